"""Checklists for submissions."""

import re
import shlex
from dataclasses import replace

import pytest

from capsule.bundle.claims import ImageClaim
from capsule.experiment.lock import LockedCode, LockedProject
from capsule.report.checklists import artifact_appendix, neurips
from capsule.report.subject import NetworkReturns
from tests.report.conftest import make_report, read


def test_the_checklist_asks_sixteen_questions_and_answers_only_what_files_show(subjects):
    document = neurips(subjects["dqn"])
    parts = re.split(r"^## \d+\. ", document, flags=re.MULTILINE)[1:]
    assert len(parts) == 16
    answered = [part for part in parts if "Answer: [Yes]" in part]
    assert [part.splitlines()[0] for part in answered] == [
        "Reproducibility of results",
        "Experimental setting",
        "Compute resources",
    ]
    assert all(re.search(r"`[\w/]+\.(json|md)`", part) for part in answered)
    assert all("TODO" in part for part in parts if part not in answered)


def test_nothing_is_said_to_be_reproduced_that_was_not(bundles, subjects, saved):
    before = artifact_appendix(subjects["dqn"])
    assert "its run was not executed again" in before
    reports = saved(make_report(subjects["dqn"]))
    after = artifact_appendix(read(bundles["dqn"], *reports))
    assert "An unsigned report says: reproduced, bit for bit" in after


def answers(document):
    """Return the answer and the justification of each question by its title."""
    parts = re.split(r"^## \d+\. ", document, flags=re.MULTILINE)[1:]
    found = {}
    for part in parts:
        title, _, answer, justification = part.strip().split("\n\n")
        found[title] = answer.removeprefix("Answer: "), justification
    return found


# neurips.cc/public/guides/PaperChecklist asks these, in this order.
TITLES = [
    "Claims",
    "Limitations",
    "Theory",
    "Reproducibility of results",
    "Open access to data and code",
    "Experimental setting",
    "Statistical significance",
    "Compute resources",
    "Code of ethics",
    "Broader impacts",
    "Safeguards",
    "Licences of existing assets",
    "New assets",
    "Crowdsourcing",
    "Review boards",
    "Use of language models",
]


@pytest.mark.parametrize("kind", ["dqn", "own"])
def test_every_question_has_an_answer_or_the_three_that_are_allowed(subjects, kind):
    found = answers(neurips(subjects[kind]))
    assert list(found) == TITLES
    for answer, justification in found.values():
        assert answer in ("[Yes] for this run", "**TODO**: [Yes], [No] or [NA]")
        assert justification.startswith("Justification: ")


def test_results_are_cited_from_the_file_that_has_them(subjects):
    _, statistics = answers(neurips(subjects["dqn"]))["Statistical significance"]
    assert "Results of this run: at step 400, mean return 26 over 4 starts" in statistics
    assert "(`run/evaluation.json`)" in statistics
    own = subjects["own"]
    _, statistics = answers(neurips(own))["Statistical significance"]
    assert "Results of this run" not in statistics
    scored = replace(own, evaluation=(NetworkReturns(1, (3.0, 5.0)),))
    _, statistics = answers(neurips(scored))["Statistical significance"]
    assert "mean return 4 over 2 starts" in statistics
    assert "run/evaluation.json" not in statistics  # a program has another file


def test_the_code_is_that_of_capsule_or_the_source_tree_of_the_program(subjects):
    _, access = answers(neurips(subjects["dqn"]))["Open access to data and code"]
    assert "The training code is Capsule's own" in access
    subject = subjects["own"]
    tree = LockedProject(sha256="0" * 64, size=0, files={}, git=None)
    lock = subject.lock.model_copy(update={"project": tree})
    _, access = answers(neurips(replace(subject, lock=lock)))["Open access to data and code"]
    assert "`image/layer-project.tar.zst`" in access


def test_components_with_a_licence_are_counted(subjects):
    subject = subjects["dqn"]
    inventory = replace(subject.inventory, licences={"MIT": 3, "GPL-2.0": 1, "not asserted": 2})
    found = answers(neurips(replace(subject, inventory=inventory)))
    said = found["Licences of existing assets"][1]
    assert "`image/sbom.cdx.json` states the licences of 4 of 6 components of the software" in said


# --- artifact evaluation ------------------------------------------------------------------------


def sections(document):
    _, *parts = re.split(r"^## (.*)\n\n", document, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_appendix_has_the_sections_of_the_template(subjects):
    """The template of cTuning, whose headings ACM conferences use."""
    assert [name.split(" (")[0] for name in sections(artifact_appendix(subjects["dqn"]))] == [
        "Abstract",
        "Artifact check-list",
        "Description",
        "Installation",
        "Experiment workflow",
        "Evaluation and expected results",
        "Experiment customization",
        "Badges",
        "Notes",
    ]


def test_every_badge_of_the_policy_is_judged_and_none_is_claimed(subjects):
    found = sections(artifact_appendix(subjects["dqn"]))
    badges = found["Badges (ACM Artifact Review and Badging 1.1)"].strip().splitlines()
    assert [line.removeprefix("- ").split(": ")[0] for line in badges] == [
        "Artifacts Available",
        "Artifacts Evaluated, functional",
        "Artifacts Evaluated, reusable",
        "Results Validated, reproduced",
        "Results Validated, replicated",
    ]
    assert all("**TODO**" in line for line in badges)


def meta(subject):
    table = sections(artifact_appendix(subject))["Artifact check-list (meta-information)"]
    rows = (line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:])
    return dict(rows)


def test_the_check_list_has_the_facts_of_the_run(subjects):
    dqn, own = meta(subjects["dqn"]), meta(subjects["own"])
    assert dqn.keys() == own.keys()
    assert dqn["Algorithm"] == "400 agent steps of DQN on gymnasium/CartPole-v1"
    assert dqn["Program"] == "Capsule, in a plain process"
    assert own["Program"] == "own program, in a plain process"
    assert dqn["Binary"] == "none; plain process"
    assert dqn["Run-time environment"].startswith("the machine's operating system, Python 3.")
    assert dqn["Time to complete"] == "1 min 20 s of training"
    assert (dqn["Metrics"], own["Metrics"]) == ("returns", "**TODO**: which of the outputs.")


def in_image(subject):
    """Return the run as if it had been executed in an image."""
    image = ImageClaim(config=f"sha256:{'a' * 64}", layers=())
    return replace(subject, claims=subject.claims.model_copy(update={"image": image}))


def test_an_image_is_named_by_its_digest(subjects):
    found = meta(in_image(subjects["dqn"]))
    assert found["Binary"] == f"container image `sha256:{'a' * 64}`"
    assert found["Program"] == "Capsule, in the image"


@pytest.mark.parametrize("kind", ["dqn", "own"])
def test_a_plain_process_is_not_said_to_have_an_image(subjects, kind):
    for document in (neurips(subjects[kind]), artifact_appendix(subjects[kind])):
        assert " image" not in document.replace("`image/sbom.cdx.json`", "")
    asked = " --key SIGNER.pub --engine process\n"
    assert asked in artifact_appendix(subjects[kind])
    image = in_image(subjects[kind])
    assert "the container image are pinned" in neurips(image)
    assert asked not in artifact_appendix(image)


@pytest.mark.parametrize("name", ["run.capsule.tar", "my run.capsule.tar", "a;b'$(x).capsule.tar"])
def test_the_command_to_verify_names_the_file_for_a_shell(subjects, name):
    document = artifact_appendix(replace(in_image(subjects["dqn"]), bundle=name))
    (command,) = re.findall(r"^    (capsule verify .*)$", document, flags=re.MULTILINE)
    assert shlex.split(command) == ["capsule", "verify", name, "--key", "SIGNER.pub"]


def code_of(subject, **facts):
    """Return where the checklist says that the code of a run is."""
    lock = subject.lock.model_copy(update=facts)
    _, said = answers(neurips(replace(subject, lock=lock)))["Open access to data and code"]
    return said.removeprefix("Justification: ").partition(" **TODO**")[0]


def test_the_code_of_a_run_is_said_to_be_where_it_is(subjects):
    project = LockedProject(sha256="0" * 64, size=0, files={}, git=None)
    own = "The training code is Capsule's own, named by digest in `spec/lock.json`."
    tree = "'s source tree is `image/layer-project.tar.zst`."
    trained, program = subjects["dqn"], in_image(subjects["own"])
    assert code_of(trained, project=None) == own
    unknown = LockedCode(version="9.9.9", sha256="0" * 64)
    other = trained.lock.image.model_copy(update={"code": unknown})
    assert "not know, named by digest" in code_of(trained, project=None, image=other)
    assert code_of(trained, project=project) == f"The environment{tree} {own}"
    assert code_of(program, project=project) == f"The program{tree}"
    assert code_of(program, project=None) == (
        "The program is part of the image, whose content is pinned by SHA-256 in `spec/lock.json`."
    )
