"""Capturing a source tree: which files, which identity, what is refused."""

import errno
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from capsule.cli.main import app
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.errors import CapsuleError
from capsule.experiment.lock import LockedProject
from capsule.experiment.spec import CodeSpec
from capsule.image.archives import layers
from capsule.image.archives.layers import CHUNK, TarEntry, file_entry, write_tar
from capsule.image.assembly.unpack import unpack_layer
from capsule.image.cache import Cache
from capsule.image.lockfile import lock_path
from capsule.image.resolution import project
from capsule.image.resolution.project import (
    FOLDER,
    capture_project,
    check_project,
    project_archive,
    read_project,
)

CORPUS = Path(__file__).parents[2] / "corpus"


@pytest.fixture
def tree(tmp_path):
    folder = tmp_path / "tree"
    write(folder, "train.py", "print(1)\n")
    write(folder, "package/model.py", "")
    return folder


def write(folder, name, text="", mode=0o644):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def git(folder, *arguments):
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *author, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def capture(folder, cache, *files, **options):
    code = CodeSpec(path=folder.name, files=files or ("*",))
    return capture_project(code, folder.parent, cache, **options)


def refused(code, folder, cache, *files):
    with pytest.raises(CapsuleError) as caught:
        capture(folder, cache, *files)
    assert caught.value.code == code
    return caught.value.message


def test_outside_of_git_every_file_is_taken(tree, cache):
    found = capture(tree, cache)
    assert set(found.files) == {"train.py", "package/model.py"}
    assert found.files["train.py"] == f"file 0644 {sha256_hex(b'print(1)' + bytes([10]))}"
    assert found.git is None
    assert project_archive(found, cache).stat().st_size == found.size


def test_time_owner_and_order_do_not_matter_but_content_name_and_mode_do(tree, cache):
    before = capture(tree, cache).sha256
    os.utime(tree / "train.py", (1, 1))
    (tree / "train.py").chmod(0o600)
    assert capture(tree, cache).sha256 == before
    (tree / "train.py").chmod(0o755)
    executable = capture(tree, cache)
    assert executable.sha256 != before
    assert executable.files["train.py"].startswith("file 0755 ")
    (tree / "train.py").chmod(0o644)
    (tree / "train.py").rename(tree / "learn.py")
    assert capture(tree, cache).sha256 != before


def test_what_capsule_and_python_leave_is_no_part_of_it(tree, cache):
    before = capture(tree, cache).sha256
    spec = write(tree, "capsule.yaml", "name: x")
    write(tree, "capsule.lock.json")
    write(tree, "__pycache__/train.cpython-311.pyc")
    write(tree, "verify-report.json")
    write(tree, "runs/x-20261121T125928Z/lock.json", '{"schema":"capsule/lock/v1"}')
    write(tree, "runs/x-20261121T125928Z/work/workspace/train.py")
    write(tree, "runs/x-20261121T125928Z/x.capsule.tar")
    assert capture(tree, cache, leave_out=[spec, lock_path(spec)]).sha256 == before


@pytest.mark.parametrize("name", [b"na\xffme", b"x\ny"])
def test_a_path_that_no_archive_has_is_named(tree, cache, name):
    write(tree, os.fsdecode(name))
    assert f"unsafe path {os.fsdecode(name)!a}" in refused("CAP-L205", tree, cache)


def test_a_file_that_changes_while_it_is_read_is_named(tree, cache, monkeypatch):
    def growing(path):
        yield path.read_bytes() + b"more"

    monkeypatch.setattr(layers, "file_chunks", growing)
    monkeypatch.setattr(project, "find_credential", lambda _: None)
    assert "changed while it was read" in refused("CAP-L205", tree, cache)
    monkeypatch.setattr(layers, "file_chunks", lambda path: (path / "gone").open())
    assert "cannot be read" in refused("CAP-L205", tree, cache)


def test_the_folder_of_a_study_is_no_part_of_it(tree, cache):
    before = capture(tree, cache).sha256
    write(tree, "studies/s/study.lock.json", '{"name":"s","schema":"capsule/study-lock/v1"}')
    write(tree, "studies/s/slurm/12_0.log")
    write(tree, "studies/s/kubernetes/namespace_job.members")
    assert capture(tree, cache).sha256 == before
    write(tree, "mine/study.lock.json", "{}")
    write(tree, "mine/notes.txt")
    assert set(capture(tree, cache).files) == {"train.py", "package/model.py", "mine/notes.txt"}


def test_what_a_killed_process_left_of_its_own_files_is_no_part_of_it(tree, cache):
    before = capture(tree, cache).sha256
    write(tree, ".capsule.lock.json.ab12cd_4")
    write(tree, ".verify-report.json.ab12cd_4")
    write(tree, ".ab12cd_4.01234567.capsule-held/thesis.html")
    assert capture(tree, cache).sha256 == before
    write(tree, ".train.py.ab12cd_4")
    assert len(capture(tree, cache).files) == 3


def test_each_lock_in_the_tree_is_read_once(tree, cache, monkeypatch):
    read, original = [], project._content
    monkeypatch.setattr(project, "_content", lambda *file: read.append(file) or original(*file))
    write(tree, "package/lock.json")
    write(tree, "package/second.py")
    capture(tree, cache)
    assert read.count((tree / "package/lock.json",)) == 1


@pytest.mark.slow
def test_what_capsule_writes_under_names_of_the_users_is_no_part_of_it(tree, cache):
    before = capture(tree, cache).sha256
    run, study = CORPUS / "dqn.capsule.tar", CORPUS / "study.capsule-study.tar"
    key = ("--key", CORPUS / "author.pub")
    for line in (
        ("report", run, *key, "-o", tree / "page.html"),
        ("export", run, *key, "--to", "csv", "-o", tree / "metrics.csv"),
        ("export", run, *key, "--to", "tensorboard", "-o", tree / "logs"),
        ("verify", run, *key, "--mode", "integrity", "--report", tree / "checked.json"),
        ("diff", run, CORPUS / "r2d2.capsule.tar", *key, "--report", tree / "differs.json"),
    ):
        done = CliRunner().invoke(app, [str(word) for word in line])
        assert done.exit_code in (0, 1), done.output
    for path in (study, CORPUS / "dqn.capsule.tar.verifier.receipt.json"):
        shutil.copy(path, tree)
    write(tree, "second.sshsig")
    assert len(list(tree.iterdir())) == 2 + 8
    assert capture(tree, cache).sha256 == before
    for name in ("page.html", "table.csv", "facts.json"):  # files of the program itself
        write(tree, f"own/{name}", "{}")
    assert len(capture(tree, cache).files) == 5


def test_patterns_leave_files_out(tree, cache):
    write(tree, "data/huge.bin")
    assert set(capture(tree, cache, "*", "!data/*").files) == {"train.py", "package/model.py"}
    assert set(capture(tree, cache, "*.py", "!package/*").files) == {"train.py"}


def test_git_decides_and_is_recorded(tree, cache):
    git(tree, "init", "--quiet")
    write(tree, ".gitignore", "*.log\n")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "-m", "first")
    commit = git(tree, "rev-parse", "HEAD")
    write(tree, "noise.log")
    clean = capture(tree, cache)
    assert set(clean.files) == {".gitignore", "train.py", "package/model.py"}
    assert (clean.git.commit, clean.git.dirty, clean.git.diff) == (commit, False, None)
    write(tree, "train.py", "print(2)\n")
    write(tree, "new.py")
    (tree / "package/model.py").unlink()
    dirty = capture(tree, cache)
    assert set(dirty.files) == {".gitignore", "train.py", "new.py"}
    assert dirty.git.dirty
    assert dirty.git.untracked == ("new.py",)
    diff = cache.trees.path(dirty.git.diff).read_text()
    assert "+print(2)" in diff
    assert "deleted file" in diff
    git(tree, "stash", "--quiet")
    (tree / "stash.diff").write_text(diff)
    git(tree, "apply", "stash.diff")
    assert (tree / "train.py").read_text() == "print(2)\n"


def test_committing_the_lock_changes_nothing(tree, cache):
    git(tree, "init", "--quiet")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "-m", "first")
    spec, lock = write(tree, "capsule.yaml"), write(tree, "capsule.lock.json")
    before = capture(tree, cache, leave_out=[spec, lock])
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "-m", "lock")
    assert capture(tree, cache, leave_out=[spec, lock]) == before


def test_a_subfolder_of_a_repository_is_a_tree_of_its_own(tree, cache):
    git(tree, "init", "--quiet")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "-m", "first")
    write(tree, "train.py", "other")
    found = capture(tree / "package", cache)
    assert set(found.files) == {"model.py"}
    assert not found.git.dirty


def commit_all(tree, message):
    git(tree, "add", "--all", ".")
    git(tree, "commit", "--quiet", "--allow-empty", "-m", message)
    return git(tree, "rev-parse", "HEAD")


@pytest.mark.parametrize("at_a_time", [1, 1_000])
def test_only_commits_that_change_a_file_of_the_tree_count(tree, cache, monkeypatch, at_a_time):
    monkeypatch.setattr(project, "_COMMITS", at_a_time)
    git(tree, "init", "--quiet")
    write(tree, "package/old model.py")
    first = commit_all(tree, "first")
    pattern = "package/*.py"
    before = capture(tree, cache, pattern)
    assert before.git.commit == first
    write(tree, "train.py", "other")
    write(tree, "package/notes.txt")
    commit_all(tree, "files that are not of the tree")
    commit_all(tree, "nothing")
    assert capture(tree, cache, pattern) == before
    (tree / "package/old model.py").rename(tree / "old model.py")
    removed = commit_all(tree, "a file leaves the tree")
    commit_all(tree, "nothing")
    assert capture(tree, cache, pattern).git.commit == removed
    write(tree, "package/model.py", "new")
    changed = commit_all(tree, "a change")
    git(tree, "checkout", "--quiet", "-b", "other", first)
    write(tree, "train.py", "another")
    commit_all(tree, "elsewhere")
    git(tree, "merge", "--quiet", "--strategy-option", "ours", "-m", "merge", changed)
    assert capture(tree, cache, pattern).git.commit == changed


def test_a_repository_without_a_commit_has_no_git_facts(tree, cache):
    git(tree, "init", "--quiet")
    assert capture(tree, cache).git is None
    assert set(capture(tree, cache).files) == {"train.py", "package/model.py"}


def test_a_branch_without_a_commit_has_no_git_facts(tree, cache):
    git(tree, "init", "--quiet")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "-m", "first")
    git(tree, "checkout", "--quiet", "--orphan", "new")
    assert capture(tree, cache).git is None


def test_submodules_are_taken_with_their_files(tree, cache, tmp_path):
    inner = tmp_path / "inner"
    write(inner, "inner.py", "x")
    for folder in (inner, tree):
        git(folder, "init", "--quiet")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", "first")
    git(tree, "-c", "protocol.file.allow=always", "submodule", "add", "--quiet", str(inner), "sub")
    git(tree, "commit", "--quiet", "-m", "submodule")
    found = capture(tree, cache)
    assert "sub/inner.py" in found.files
    assert found.git.untracked == ()


def test_a_broken_repository_is_an_error_not_a_plain_folder(tree, cache):
    (tree / ".git").write_text("gitdir: /nowhere")
    assert "git ls-files fails" in refused("CAP-L202", tree, cache)


def test_a_link_inside_is_kept_and_one_that_leads_outside_is_refused(tree, cache):
    (tree / "package/link").symlink_to("../train.py")
    assert capture(tree, cache).files["package/link"] == "symlink ../train.py"
    for target in ("/etc/passwd", "../../other", str(tree / "train.py")):
        (tree / "package/link").unlink()
        (tree / "package/link").symlink_to(target)
        assert "package/link" in refused("CAP-L205", tree, cache)


def test_a_link_whose_target_is_not_utf8_is_refused(tree, cache):
    (tree / "link").symlink_to(os.fsdecode(b"\xff"))
    assert r"link to '\udcff', which is not UTF-8" in refused("CAP-L205", tree, cache)


def test_a_chain_of_links_cannot_lead_outside(tree, cache):
    (tree / "a/b/c").mkdir(parents=True)
    (tree / "a/b/c/root").symlink_to("../../..")
    (tree / "a/b/c/out").symlink_to("root/../..")
    assert "a/b/c/out" in refused("CAP-L205", tree, cache)


def test_special_files_are_refused(tree, cache):
    os.mkfifo(tree / "pipe")
    assert "pipe" in refused("CAP-L205", tree, cache)


class TestCredentials:
    @pytest.mark.parametrize("kind", ["", "OPENSSH ", "RSA ", "ENCRYPTED "])
    @pytest.mark.parametrize("before", [0, 5_000, CHUNK - 20, 3 * CHUNK])
    def test_private_keys_are_found_wherever_they_are_in_a_file(self, tree, cache, kind, before):
        write(tree, "alice", "x" * before + f"\n-----BEGIN {kind}PRIVATE KEY-----\n")
        message = refused("CAP-L206", tree, cache)
        assert message.startswith("alice of the source tree holds a private key")
        assert "alice" not in capture(tree, cache, "*", "!alice").files

    def test_a_file_that_the_spec_names_itself_is_taken(self, tree, cache):
        write(tree, "tests/key.pem", "-----BEGIN PRIVATE KEY-----\n")
        assert "tests/key.pem" in capture(tree, cache, "*", "tests/key.pem").files
        refused("CAP-L206", tree, cache, "*", "tests/*")

    @pytest.mark.parametrize(
        "name",
        [".env", ".env.local", ".netrc", "sub/.npmrc", ".aws_credentials", ".aws/credentials"],
    )
    def test_files_of_credentials_are_refused_by_their_names(self, tree, cache, name):
        write(tree, name, "nothing")
        assert name in refused("CAP-L206", tree, cache)

    @pytest.mark.parametrize(
        "name", [".env.example", "credentials.py", "environment", ".ssh/a.pub"]
    )
    def test_names_that_only_resemble_them_are_taken(self, tree, cache, name):
        write(tree, name, "nothing")
        assert name in capture(tree, cache).files

    @pytest.mark.parametrize(
        ("kind", "token"),
        [
            ("AWS", "AKIA" + "A" * 16),
            ("GitHub", "ghp_" + "a" * 36),
            ("Hugging Face", "hf_" + "a" * 34),
            ("Slack", "xoxb-" + "1" * 12 + "-" + "a" * 20),
            ("Anthropic", "sk-ant-" + "a" * 40),
        ],
    )
    def test_tokens_are_refused_by_their_form(self, tree, cache, kind, token):
        write(tree, "config.py", f"TOKEN = '{token}'\n")
        assert kind in refused("CAP-L206", tree, cache)

    def test_what_a_deleted_file_held_is_not_in_the_diff(self, tree, cache):
        write(tree, "old", "something that was deleted\n")
        git(tree, "init", "-q")
        git(tree, "add", ".")
        git(tree, "commit", "-qm", "first")
        (tree / "old").unlink()
        found = capture(tree, cache)
        diff = cache.trees.path(found.git.diff).read_bytes()
        assert b"deleted file mode" in diff
        assert b"something that was deleted" not in diff

    def test_a_token_that_was_removed_since_the_last_commit_is_not_published(self, tree, cache):
        write(tree, "config.py", f"TOKEN = 'hf_{'a' * 34}'\n")
        git(tree, "init", "-q")
        git(tree, "add", ".")
        git(tree, "commit", "-qm", "first")
        write(tree, "config.py", "TOKEN = None\n")
        message = refused("CAP-L206", tree, cache)
        assert message.startswith("config.py of the source tree differs from its last commit")
        git(tree, "commit", "-qam", "second")
        assert capture(tree, cache).git.diff is None


@pytest.mark.slow
def test_sizes_and_counts_are_bounded(tree, cache, monkeypatch):
    with (tree / "big").open("wb") as stream:
        stream.truncate(project.MAX_BYTES + 1)
    assert "more than 256 MiB" in refused("CAP-L204", tree, cache)
    (tree / "big").unlink()
    monkeypatch.setattr(project, "MAX_FILES", 1)
    assert "2 files, more than 1" in refused("CAP-L204", tree, cache)


def test_a_missing_or_empty_tree_is_refused(tree, cache, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for name, said in (
        ("nowhere", "is not a folder"),
        ("loop", "is not a folder"),
        ("a" * 300, "cannot be read: File name too long"),
    ):
        assert said in refused("CAP-L201", tmp_path / name, cache)
    refused("CAP-L203", tree, cache, "*.rs")


def test_a_folder_of_the_tree_that_cannot_be_read_is_named(tree, cache, monkeypatch):
    scandir = os.scandir

    def denied(path):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    (tree / "closed").mkdir()
    monkeypatch.setattr("os.scandir", denied)
    with pytest.raises(CapsuleError, match=r"CAP-L201 code\.path: .*closed cannot be") as caught:
        capture(tree, cache)
    assert "permissions of this folder" in caught.value.fix


def test_what_a_run_in_the_tree_removes_meanwhile_is_no_part_of_it(tree, cache, monkeypatch):
    folder, file = tree / "runs" / "x" / "temporary", write(tree, "runs/x/loss.json")
    folder.mkdir()
    listed, looked = os.scandir, Path.is_file

    def scandir(path):
        if path == folder:
            folder.rmdir()
        return listed(path)

    def is_file(path):
        found = looked(path)
        if path == file:
            file.unlink(missing_ok=True)
        return found

    monkeypatch.setattr("os.scandir", scandir)
    monkeypatch.setattr(Path, "is_file", is_file)
    assert list(capture(tree, cache).files) == ["package/model.py", "train.py"]
    assert not folder.exists()
    assert not file.exists()


def test_a_lock_whose_tree_is_gone_says_so(tree, cache, tmp_path):
    found = capture(tree, cache)
    with pytest.raises(CapsuleError) as caught:
        project_archive(found, Cache(tmp_path / "other"))
    assert caught.value.code == "CAP-I112"


@pytest.mark.parametrize(
    "entry",
    [
        file_entry("usr/lib/python3.11/random.py", "test", b""),
        file_entry("project", "test", b""),
        file_entry("projects/train.py", "test", b""),
        TarEntry("home", "test", "directory"),
    ],
    ids=lambda entry: entry.path,
)
def test_a_tree_with_a_file_elsewhere_in_the_image_is_refused(tmp_path, entry):
    archive = tmp_path / "tree.tar"
    with archive.open("wb") as stream:
        write_tar([entry], stream.write)
    with pytest.raises(CapsuleError, match="is not in the folder /project") as caught:
        read_project(archive)
    assert caught.value.code == "CAP-I110"


def test_another_tree_is_refused_and_the_first_file_that_differs_is_named(tree, cache):
    locked = capture(tree, cache)
    write(tree, "train.py", "print(3)\n")
    other = cache.trees.path(capture(tree, cache).sha256)
    with pytest.raises(CapsuleError, match=r"train\.py is file 0644") as caught:
        check_project(locked, other)
    assert caught.value.code == "CAP-I110"


def test_unpacking_gives_the_tree_again(tree, cache, tmp_path):
    write(tree, "run.sh", "#!/bin/sh\n", mode=0o755)
    (tree / "link").symlink_to("train.py")
    found = capture(tree, cache)
    unpack_layer(project_archive(found, cache), "a tree", tmp_path / "out", FOLDER)
    assert (tmp_path / "out/train.py").read_text() == "print(1)\n"
    assert stat.S_IMODE((tmp_path / "out/run.sh").stat().st_mode) == 0o755
    assert (tmp_path / "out/link").readlink().name == "train.py"
    again = capture_project(CodeSpec(path="out"), tmp_path, cache)
    assert again == found


NAMES = st.text(st.sampled_from("ab.é -"), min_size=1, max_size=6).filter(
    lambda name: name not in {".", ".."} and not name.startswith(".git")
)

# A private key is refused, which test_special_files_and_private_keys_are_refused looks at.
CONTENTS = st.binary(max_size=40).filter(lambda data: b"PRIVATE KEY-----" not in data)


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(NAMES, CONTENTS, min_size=1, max_size=5))
def test_any_tree_survives_the_archive(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("any")
    for name, data in files.items():
        (folder / "tree" / name).parent.mkdir(exist_ok=True)
        (folder / "tree" / name).write_bytes(data)
    cache = Cache(folder / "cache")
    found = capture_project(CodeSpec(path="tree"), folder, cache)
    assert isinstance(found, LockedProject)
    facts, digest = read_project(project_archive(found, cache))
    assert (facts, digest) == (found.files, found.sha256)
    unpack_layer(cache.trees.path(digest), "a tree", folder / "out", FOLDER)
    assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == files
