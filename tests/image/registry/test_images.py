"""Images to and from Debian's registry, with skopeo as an independent client."""

import base64
import hashlib
import json
import subprocess
import tarfile
from dataclasses import replace

import pytest
import requests

from capsule.experiment.canonical import sha256_file
from capsule.image.assembly.assemble import save_archive
from capsule.image.registry.images import pull_image, push_image
from capsule.image.registry.reference import Reference
from tests.refusals import refused


def ignore(_):
    pass


def skopeo(*words):
    done = subprocess.run(["skopeo", *words], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def log_in(tmp_path, host, password):
    (tmp_path / "docker").mkdir(exist_ok=True)
    auth = base64.b64encode(f"alice:{password}".encode()).decode()
    (tmp_path / "docker" / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))


def pull(reference, folder, expected=None):
    folder.mkdir(exist_ok=True)
    return pull_image(reference, folder, ignore, expected)


def test_skopeo_finds_the_manifest_of_the_bundle_under_its_digest(serve, image):
    host = serve()
    pushed = push_image(image, Reference.parse(f"{host}/group/tiny:paper"), ignore)
    assert str(pushed) == f"{host}/group/tiny:paper@{image.manifest_digest}"
    name = f"docker://{host}/group/tiny:paper"
    assert skopeo("inspect", "--tls-verify=false", "--raw", name) == image.manifest
    assert skopeo("inspect", "--tls-verify=false", "--config", "--raw", name) == image.config
    found = json.loads(skopeo("inspect", "--tls-verify=false", name))
    assert found["Digest"] == image.manifest_digest
    assert found["Layers"] == [layer.diff_id for layer in image.layers]


def test_skopeo_copies_every_byte(serve, image, tmp_path):
    host = serve()
    push_image(image, Reference.parse(f"{host}/tiny:1"), ignore)
    source, target = f"docker://{host}/tiny:1", f"dir:{tmp_path / 'copy'}"
    skopeo("--insecure-policy", "copy", "--src-tls-verify=false", source, target)
    for layer in image.layers:
        assert sha256_file(tmp_path / "copy" / layer.diff_id[7:]) == layer.diff_id[7:]


def test_the_tag_is_the_identity_if_none_is_given(serve, image):
    pushed = push_image(image, Reference.parse(f"{serve()}/tiny"), ignore)
    assert pushed.tag == image.config_digest[7:19]


def test_a_pulled_image_is_the_pushed_one(serve, image, tmp_path):
    pushed = push_image(image, Reference.parse(f"{serve()}/tiny:1"), ignore)
    for reference in pushed, pushed._replace(digest=None), pushed._replace(tag=None):
        pulled = pull(reference, tmp_path / f"pulled-{reference.tag}-{bool(reference.digest)}")
        assert (pulled.config, pulled.manifest) == (image.config, image.manifest)
        assert [layer.diff_id for layer in pulled.layers] == [la.diff_id for la in image.layers]
        for layer in pulled.layers:
            assert f"sha256:{sha256_file(layer.path)}" == layer.diff_id
    save_archive(replace(pulled, reference=image.reference), tmp_path / "pulled.tar")
    save_archive(image, tmp_path / "own.tar")
    assert sha256_file(tmp_path / "pulled.tar") == sha256_file(tmp_path / "own.tar")


def test_what_the_registry_has_is_not_sent_again(serve, image):
    host, notes = serve(), []
    push_image(image, Reference.parse(f"{host}/tiny:1"), ignore)
    push_image(image, Reference.parse(f"{host}/tiny:2"), notes.append)
    assert notes == []


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_an_image_that_another_tool_pushed_is_unpacked_to_the_same_layers(
    compression, serve, image, tmp_path
):
    host = serve()
    save_archive(image, tmp_path / "image.tar")
    source, target = f"oci-archive:{tmp_path / 'image.tar'}", f"docker://{host}/tiny:other"
    options = ["--dest-tls-verify=false", "--dest-compress-format", compression]
    # By way of a folder, since skopeo compresses when it copies from one.
    skopeo("--insecure-policy", "copy", source, f"dir:{tmp_path / 'folder'}")
    skopeo("--insecure-policy", "copy", *options, f"dir:{tmp_path / 'folder'}", target)
    manifest = json.loads(
        skopeo("inspect", "--tls-verify=false", "--raw", f"docker://{host}/tiny:other")
    )
    assert {layer["mediaType"].rpartition("+")[2] for layer in manifest["layers"]} == {compression}
    pulled = pull(Reference.parse(f"{host}/tiny:other"), tmp_path / "pulled", image)
    assert (pulled.config_digest, pulled.manifest) == (image.config_digest, image.manifest)


def test_a_registry_with_passwords(serve, image, tmp_path):
    host = serve(password=True)
    reference = Reference.parse(f"{host}/tiny:1")
    assert "without a login" in refused("CAP-I403", push_image, image, reference, ignore)
    log_in(tmp_path, host, "wrong")
    assert "as 'alice'" in refused("CAP-I403", push_image, image, reference, ignore)
    log_in(tmp_path, host, "secret")
    push_image(image, reference, ignore)
    assert pull(reference, tmp_path / "pulled").config == image.config


def test_a_password_of_a_credential_helper(serve, image, tmp_path, monkeypatch):
    host = serve(password=True)
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "config.json").write_text(json.dumps({"credsStore": "tests"}))
    helper = tmp_path / "docker-credential-tests"
    login = '{"Username": "alice", "Secret": "secret"}'
    helper.write_text(f"#!/bin/sh\ntest \"$(cat)\" = {host} && echo '{login}'\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    push_image(image, Reference.parse(f"{host}/tiny:1"), ignore)


def test_another_image_than_the_expected_one_is_refused(serve, image, tmp_path, tiny):
    host = serve()
    push_image(image, Reference.parse(f"{host}/tiny:1"), ignore)
    other = replace(image, config=b"{}")
    message = refused(
        "CAP-I405", pull, Reference.parse(f"{host}/tiny:1"), tmp_path / "pulled", other
    )
    assert image.config_digest in message
    assert list((tmp_path / "pulled").iterdir()) == []


def test_what_is_missing_is_named(serve, image, tmp_path):
    host = serve()
    assert "404" in refused("CAP-I402", pull, Reference.parse(f"{host}/no:1"), tmp_path / "pulled")
    gone = Reference.parse("127.0.0.1:9/no:1")
    refused("CAP-I402", pull, gone, tmp_path / "pulled")
    refused("CAP-I402", push_image, image, gone, ignore)


def test_a_name_without_a_tag_cannot_be_pulled_nor_one_with_a_digest_pushed(image, tmp_path):
    name = Reference.parse("127.0.0.1:9/tiny")
    refused("CAP-I401", pull, name, tmp_path / "pulled")
    refused("CAP-I401", push_image, image, name._replace(digest=image.manifest_digest), ignore)


def put(host, content, kind=None):
    """Upload a blob, or a manifest of some media type, without Capsule."""
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    place = f"http://{host}/v2/tiny/manifests/bad"
    if kind is None:
        answer = requests.post(f"http://{host}/v2/tiny/blobs/uploads/", timeout=600)
        place = f"{answer.headers['Location']}&digest={digest}"
    headers = {"Content-Type": kind or "application/octet-stream"}
    requests.put(place, content, headers=headers, timeout=600).raise_for_status()
    return {"digest": digest, "size": len(content)}


@pytest.mark.parametrize(
    "damage",
    ["another diff id", "not gzip", "unknown type", "other system", "fewer layers", "size"],
)
def test_an_image_that_contradicts_itself_is_refused(damage, serve, image, tmp_path):
    host = serve()
    layer = image.layers[-1].path.read_bytes()
    diff_id = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    config = {
        "os": "plan9" if damage == "other system" else "linux",
        "architecture": "amd64",
        "rootfs": {
            "type": "layers",
            "diff_ids": ["sha256:" + "1" * 64 if damage == "another diff id" else diff_id],
        },
    }
    if damage == "fewer layers":
        config["rootfs"]["diff_ids"].append(diff_id)
    endings = {"not gzip": ".v1.tar+gzip", "unknown type": ".v1.tar+xz"}
    media = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{media}.manifest.v1+json",
        "config": {
            "mediaType": f"{media}.config.v1+json",
            **put(host, json.dumps(config).encode()),
        },
        "layers": [
            {"mediaType": f"{media}.layer{endings.get(damage, '.v1.tar')}", **put(host, layer)}
        ],
    }
    if damage == "size":
        manifest["layers"][0]["size"] = 1 << 40
    put(host, json.dumps(manifest).encode(), manifest["mediaType"])
    refused("CAP-I405", pull, Reference.parse(f"{host}/tiny:bad"), tmp_path / "pulled")


def test_an_archive_of_a_pulled_image_has_its_name(serve, image, tmp_path):
    host = serve()
    pushed = push_image(image, Reference.parse(f"{host}/tiny:1"), ignore)
    save_archive(pull(pushed, tmp_path / "pulled"), tmp_path / "image.tar")
    with tarfile.open(tmp_path / "image.tar") as archive:
        (entry,) = json.load(archive.extractfile("manifest.json"))
    assert entry["RepoTags"] == [f"{host}/tiny:1"]
