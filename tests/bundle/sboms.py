"""SBOMs of images that were never made, and of this machine."""

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from capsule.bundle.licences import debian_choice, expression_choice
from capsule.bundle.package_urls import debian_purl, wheel_purl
from capsule.bundle.sbom import image_sbom
from capsule.experiment.canonical import sha256_hex
from capsule.experiment.lock import LockedGit, LockedProject
from capsule.experiment.spec import CudaAccelerator
from capsule.machine.fingerprint import take_fingerprint
from tests.bundle.locks import debian, digest_of, make_lock, wheel

VALIDATOR = JsonStrictValidator(SchemaVersion.V1_6)
DIGEST = "sha256:" + sha256_hex(b"image")


PACKAGES = (debian("libstdc++6", "12.2.0-14+deb12u1"), debian("tzdata", "1:2026a~1-0", "all"))
CPU = make_lock(
    wheels=(wheel("torch", "2.13.0+cpu", "cp311-cp311-linux_x86_64"), wheel("ale-py", "0.12.1")),
    packages=PACKAGES,
)
CUDA = make_lock(
    "cuda",
    wheels=(
        wheel("torch", "2.13.0"),
        wheel("nvidia-cuda-runtime", "13.0.96"),
        wheel("nvidia-cudnn-cu13", "9.15.1.9"),
        wheel("nvidia-cublas", "13.1.0.3"),
        wheel("triton", "3.6.0"),
    ),
    packages=PACKAGES,
    accelerator=CudaAccelerator(kind="cuda", cuda="13.0", cudnn=">=9.10", driver=">=580.65"),
)
PROGRAM = CPU.model_copy(
    update={
        "project": LockedProject(
            sha256=digest_of("tree"),
            size=10_240,
            files={"train.py": f"file 0644 {digest_of('train')}", "link": "symlink train.py"},
            git=LockedGit(commit="1" * 40, dirty=True, diff=None, untracked=("train.py",)),
        )
    }
)
TORCH_PURL = wheel_purl(CPU.image.wheels[0])
LICENCES = {
    TORCH_PURL: expression_choice("BSD-3-Clause"),
    wheel_purl(CPU.image.wheels[1]): expression_choice("GPL-2.0-only OR LicenseRef-Other"),
    debian_purl(PACKAGES[1], "debian-12"): debian_choice(("Expat", "public-domain")),
}
GOOD = image_sbom(CPU, DIGEST, LICENCES)
BARE = image_sbom(CPU, DIGEST)  # licences are their author's word: no lock contradicts them
HERE = take_fingerprint({"name": "docker", "version": "20.10.24", "storage-driver": "overlay2"})
