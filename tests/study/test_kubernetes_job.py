"""The manifest of a study's Job: the published schemas accept it, and its command is run."""

import copy
import json
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest

from capsule.host.errors import CapsuleError
from capsule.study.directory import StudyDirectory
from capsule.study.kubernetes_job import JobTemplate, job_name
from capsule.study.running import MemberBatch, RunOptions
from tests.study.studies import BASE, make_lock

TEMPLATE = """\
apiVersion: batch/v1
kind: Job
metadata:
  namespace: rl
spec:
  template:
    spec:
      nodeSelector: {pool: batch}
      containers:
        - name: capsule
          image: registry.example.org/capsule:0.1.0
          volumeMounts: [{name: shared, mountPath: /shared}]
      volumes:
        - name: shared
          persistentVolumeClaim: {claimName: shared}
"""
ROOT = Path(__file__).parents[2]
VERSIONS = [f"1.{minor}" for minor in range(29, 38)]


@pytest.fixture
def study(tmp_path):
    lock = make_lock(resources={"memory_mb": 512, "minutes": 5})
    return StudyDirectory.create(tmp_path / "a study's $$ $(folder)", lock, resume=False)


@pytest.fixture
def options(tmp_path):
    return RunOptions(tmp_path / "my key", tmp_path / "pass'phrase", "process")


def template(folder, text=TEMPLATE):
    path = folder / "job.yaml"
    path.write_text(text)
    return JobTemplate.load(path)


def refused(folder, code, study=None, text=TEMPLATE, *replacement):
    with pytest.raises(CapsuleError) as caught:
        loaded = template(folder, text.replace(*replacement) if replacement else text)
        loaded.manifest("tiny-1", MemberBatch(study, study.missing(), RunOptions(Path("k"))))
    assert caught.value.code == code
    return caught.value


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifest_is_valid_by_the_published_schema(study, options, tmp_path, version):
    manifest = template(tmp_path).manifest("tiny-1", MemberBatch(study, study.missing(), options))
    assert version in kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schema_would_find_an_error(study, options, tmp_path):
    manifest = template(tmp_path).manifest("tiny-1", MemberBatch(study, study.missing(), options))
    for field, value in (("completions", "two"), ("completionmode", "Indexed")):
        wrong = copy.deepcopy(manifest)
        wrong["spec"][field] = value
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_the_example_of_the_documentation_is_a_template(study, options, tmp_path):
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    example = template(tmp_path, page.split("```yaml\n")[1].split("```")[0])
    manifest = example.manifest("tiny-1", MemberBatch(study, study.missing(), options))
    kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    assert manifest["spec"]["parallelism"] == 20


def test_every_member_runs_to_its_end_once_at_a_time(study, options, tmp_path):
    names = study.missing()
    loaded = template(tmp_path)
    manifest = loaded.manifest("tiny-1", MemberBatch(study, names, options))
    pod = manifest["spec"].pop("template")["spec"]
    assert manifest == {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"namespace": "rl", "name": "tiny-1"},
        "spec": {
            "completions": len(names),
            "parallelism": len(names),
            "completionMode": "Indexed",
            "backoffLimitPerIndex": 0,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    }
                ]
            },
        },
    }
    assert pod["restartPolicy"] == "Never"
    assert pod["activeDeadlineSeconds"] == 300
    assert pod["terminationGracePeriodSeconds"] == 90
    assert pod["nodeSelector"] == {"pool": "batch"}
    assert pod["containers"][0]["volumeMounts"] == [{"name": "shared", "mountPath": "/shared"}]
    assert "completions" not in loaded.document.tree["spec"]


def test_what_is_reserved(options, tmp_path):
    limited = {**BASE, "limits": {"memory_mb": 2_000, "minutes": 30}}
    exact = {"cores": 4, "memory_mb": 3_000, "gpus": 1, "minutes": 5}
    found = []
    for number, resources in enumerate(({}, exact)):
        lock = make_lock(base=limited, resources=resources)
        each = StudyDirectory.create(tmp_path / str(number), lock, resume=False)
        manifest = template(tmp_path).manifest("tiny-1", MemberBatch(each, each.missing(), options))
        pod = manifest["spec"]["template"]["spec"]
        found.append((pod["activeDeadlineSeconds"], pod["containers"][0]["resources"]))
    implicit = {"cpu": "1", "memory": "2512Mi"}
    explicit = {"cpu": "4", "memory": "3000Mi", "nvidia.com/gpu": "1"}
    assert found == [
        (1_800, {"requests": implicit, "limits": implicit}),
        (300, {"requests": explicit, "limits": explicit}),
    ]


def test_the_command_runs_the_member_of_its_index(study, options, tmp_path):
    names = study.missing()
    command = template(tmp_path).manifest("tiny-1", MemberBatch(study, names, options))["spec"][
        "template"
    ]["spec"]["containers"][0]["command"]
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "capsule").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (programs / "capsule").chmod(0o700)
    for index in (0, 1, len(names) - 1):
        done = subprocess.run(
            [word.replace("$$", "$") for word in command],
            env={"PATH": f"{programs}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": str(index)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        assert done.stdout.split("\0")[:-1] == [
            *("study", "member", str(study.path.absolute()), names[index]),
            *options.arguments(),
        ]


def test_a_command_that_is_given_no_index_runs_nothing(study, options, tmp_path):
    pod = template(tmp_path).manifest("tiny-1", MemberBatch(study, study.missing(), options))[
        "spec"
    ]
    command = pod["template"]["spec"]["containers"][0]["command"]
    words = [word.replace("$$", "$") for word in command]
    done = subprocess.run(words, env={"PATH": "/nonexistent"}, stderr=subprocess.DEVNULL)
    assert done.returncode not in (0, 127)  # 127: it would have looked for the program


@pytest.mark.slow
def test_a_study_of_two_thousand_members_fits_into_a_manifest(options, tmp_path):
    lock = make_lock(groups={"a-group-whose-name-has-32-letter": {}}, runs=2_000)
    study = StudyDirectory.create(tmp_path / "study", lock, resume=False)
    manifest = template(tmp_path).manifest("tiny-1", MemberBatch(study, study.missing(), options))
    assert len(json.dumps(manifest)) < 1_000_000  # etcd takes 1.5 MiB
    command = manifest["spec"]["template"]["spec"]["containers"][0]["command"]
    done = subprocess.run(
        ["/bin/sh", "-c", 'shift "$JOB_COMPLETION_INDEX"; echo "$1"', *command[3:]],
        env={"JOB_COMPLETION_INDEX": "1999"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == study.missing()[-1]


def test_the_templates_parallelism_stays(study, options, tmp_path):
    loaded = template(tmp_path, TEMPLATE.replace("spec:\n", "spec:\n  parallelism: 2\n", 1))
    manifest = loaded.manifest("tiny-1", MemberBatch(study, study.missing(), options))
    assert manifest["spec"]["parallelism"] == 2


def test_a_template_may_say_what_capsule_says(study, options, tmp_path):
    text = TEMPLATE.replace("spec:\n", "spec:\n  completionMode: Indexed\n", 1).replace(
        "image:", "resources: {limits: {cpu: 1, ephemeral-storage: 4Gi}}\n          image:"
    )
    manifest = template(tmp_path, text).manifest(
        "tiny-1", MemberBatch(study, study.missing(), options)
    )
    resources = manifest["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"] == {"cpu": "1", "memory": "512Mi", "ephemeral-storage": "4Gi"}


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (
            "metadata:\n",
            "metadata:\n  name: mine\n",
            "4:3: metadata.name is 'mine', but it is set by",
        ),
        (
            "metadata:\n",
            "metadata:\n  generateName: m-\n",
            "generateName is 'm-', but it must be absent",
        ),
        (
            "spec:\n",
            "spec:\n  completions: 2\n",
            "6:3: spec.completions is 2, but it is set by Capsule, to 9",
        ),
        ("spec:\n", "spec:\n  backoffLimit: 0\n", "spec.backoffLimit is 0, but it must"),
        ("spec:\n", "spec:\n  maxFailedIndexes: 0\n", "spec.maxFailedIndexes is 0"),
        ("spec:\n", "spec:\n  activeDeadlineSeconds: 9\n", "spec.activeDeadlineSeconds is 9"),
        (
            "nodeSelector: {pool: batch}",
            "restartPolicy: OnFailure",
            "restartPolicy is 'OnFailure', but",
        ),
        (
            "nodeSelector: {pool: batch}",
            "terminationGracePeriodSeconds: 5",
            "is 5, but it is set by Capsule, to 90",
        ),
        (
            "image:",
            "command: [sh]\n          image:",
            "containers.0.command is ['sh'], but it is set",
        ),
        ("image:", "args: [x]\n          image:", "containers.0.args is ['x'], but"),
        (
            "image:",
            "resources: {limits: {memory: 1Gi}}\n          image:",
            "limits.memory is '1Gi', but it is set by Capsule, to '512Mi'",
        ),
    ],
)
def test_a_field_of_capsules_is_refused(study, tmp_path, old, new, named):
    text = TEMPLATE.replace(old, new, 1)
    error = refused(tmp_path, "CAP-Y027", study, text)
    assert named in error.message
    assert str(tmp_path / "job.yaml") in error.message
    assert "'resources' of the study" in error.fix


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("batch/v1", "v1", "1:1: apiVersion is not batch/v1"),
        ("kind: Job", "kind: Pod", "2:1: kind is not Job"),
        ("image: registry.example.org/capsule:0.1.0", "tty: true", "containers.0.image is missing"),
        ("containers:", "initContainers:", "containers.0.image is missing"),
        ("image:", "resources: 1\n          image:", "containers.0.resources is not a section"),
        ("metadata:\n  namespace: rl", "metadata: rl", "metadata is not a section"),
    ],
)
def test_what_is_not_the_manifest_of_a_job_is_refused(study, tmp_path, old, new, named):
    error = refused(tmp_path, "CAP-Y026", study, TEMPLATE.replace(old, new, 1))
    assert named in error.message


def test_a_template_that_cannot_be_read(study, tmp_path):
    with pytest.raises(CapsuleError, match="cannot read template") as caught:
        JobTemplate.load(tmp_path / "nonesuch.yaml")
    assert caught.value.code == "CAP-S001"
    assert refused(tmp_path, "CAP-S002", study, "kind: Job\nkind: Job\n").message
    assert "manifest of a Kubernetes Job" in refused(tmp_path, "CAP-S002", study, "").fix


def test_names_of_jobs_are_labels():
    assert job_name("rates", "0a1b") == "rates-0a1b"
    assert job_name("my_study.v2", "0a1b") == "my-study-v2-0a1b"
    assert len(job_name("x" * 64, "0a1b2c3d")) + len("-1999") <= 63
    assert job_name("x" * 39 + "." + "y", "0a1b") == "x" * 39 + "-0a1b"
