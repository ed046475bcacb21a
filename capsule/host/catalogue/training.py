"""Causes and fixes of the codes that are raised inside images, by the training side above all.

Their exit statuses stand in :mod:`capsule.experiment.errors`, which goes into images; these texts
do not, so that an edit changes no lock.
"""

from capsule.host.catalogue.entry import ErrorTexts

TEXTS: dict[str, ErrorTexts] = {
    "CAP-N001": ErrorTexts(
        "a compiled part of Capsule is missing from the installation",
        "install the wheel, or run `bash scripts/setup.sh` in a checkout",
    ),
    "CAP-S007": ErrorTexts(
        "no human score is known for a game",
        "name a game of Atari-57 or a level of DMLab-30",
    ),
    "CAP-T101": ErrorTexts(
        "a determinism variable was not set before the interpreter, or a child process, started",
        "run through `capsule run`; set it for no child",
    ),
    "CAP-T102": ErrorTexts(
        "the interpreter ignores the hash seed, or torch came first",
        "start it as the image does",
    ),
    "CAP-T103": ErrorTexts(
        "the CPU lacks what the numerics profile needs",
        "another CPU, or `numerics: native`",
    ),
    "CAP-T104": ErrorTexts(
        "a flag reads back otherwise than it was set",
        "use the pinned packages",
    ),
    "CAP-T105": ErrorTexts(
        "the GPU that the spec asks for is not there",
        "a machine with it",
    ),
    "CAP-T106": ErrorTexts(
        "the image brings another CUDA or cuDNN than the spec asks for",
        "pin packages that bring it",
    ),
    "CAP-T107": ErrorTexts(
        "a package is not in the image",
        "add it to `image.packages`",
    ),
    "CAP-T108": ErrorTexts(
        "`libcapsule-math.so` is not preloaded under a portable profile",
        "run through `capsule run`; by hand, set `LD_PRELOAD`",
    ),
    "CAP-T109": ErrorTexts(
        "this machine computes other bits than the profile promises",
        "`capsule doctor`; report it; another profile",
    ),
    "CAP-T111": ErrorTexts(
        "`job.json` is missing or malformed",
        "start with `capsule run`",
    ),
    "CAP-T112": ErrorTexts(
        "a prefix does not end on an update",
        "name a multiple of `trainer.update_interval`",
    ),
    "CAP-T113": ErrorTexts(
        "a resumed run would continue with other flags, libraries or, unless its numerics are "
        "portable, on another device",
        "resume it where it began",
    ),
    "CAP-T121": ErrorTexts(
        "the trace is shorter than the saved state says",
        "start a new run",
    ),
    "CAP-T131": ErrorTexts(
        "a file cannot be written",
        "free disk space, then resume",
    ),
    "CAP-T132": ErrorTexts(
        "a saved state is damaged",
        "start a new run",
    ),
    "CAP-T133": ErrorTexts(
        "a saved state is of another spec",
        "give the job its own run directory",
    ),
    "CAP-T141": ErrorTexts(
        "a trace file is malformed",
        "take it from the run directory again",
    ),
    "CAP-T151": ErrorTexts(
        "the loss is not finite, or a policy's probabilities are not",
        "lower the learning rate",
    ),
    "CAP-T161": ErrorTexts(
        "a state cannot be kept (`recording.segment_states`)",
        "free disk space, then resume; or set it to false",
    ),
    "CAP-T201": ErrorTexts(
        "a saved stream is of another seed",
        "resume with the original spec",
    ),
    "CAP-T211": ErrorTexts(
        "a replayed episode ends otherwise",
        "resume inside the original image",
    ),
    "CAP-T212": ErrorTexts(
        "`environment.game` is unknown",
        "use a ROM name as ale-py spells it",
    ),
    "CAP-T213": ErrorTexts(
        "the episode ended during the no-ops",
        "lower `environment.noop_max`",
    ),
    "CAP-T214": ErrorTexts(
        "`environment.id` or one of `environment.modules` is unknown, or the spaces are not "
        "supported",
        "discrete actions; observations of numbers",
    ),
    "CAP-T215": ErrorTexts(
        "the package minatar is missing",
        "add it to `image.packages`",
    ),
    "CAP-T216": ErrorTexts(
        "`environment.observation`, `environment.frames`, `environment.instruction` or "
        "`environment.masked_observations` does not fit the observations",
        "what the message says there is",
    ),
    "CAP-T221": ErrorTexts(
        "the replay memory's files cannot be reserved",
        "free disk space, or a smaller capacity",
    ),
    "CAP-T222": ErrorTexts(
        "too few transitions to sample from",
        "raise `trainer.replay_start`",
    ),
    "CAP-T223": ErrorTexts(
        "the replay memory's files are not those of the saved state",
        "start a new run",
    ),
    "CAP-T231": ErrorTexts(
        "too few evaluation starts survive",
        "shorter starts, or more candidates",
    ),
    "CAP-T232": ErrorTexts(
        "a start of `evaluation.start_set` has an action that the environment does not have",
        "make the start set with a run of this environment",
    ),
    "CAP-T241": ErrorTexts(
        "the vocabulary of instructions has something that is not one word in small letters",
        "write words apart, without punctuation",
    ),
    "CAP-T242": ErrorTexts(
        "an instruction has an unknown word, or too many words",
        "add the word, or make room",
    ),
    "CAP-T243": ErrorTexts(
        "the frames are too small for the convolutions of `trainer.network`",
        "use `residual` or `small-conv`",
    ),
    "CAP-T301": ErrorTexts(
        "`trainer.command` cannot be started",
        "name a program of the image, or `./FILE` of the source tree",
    ),
    "CAP-T302": ErrorTexts(
        "the program failed",
        "see `output.log`",
    ),
    "CAP-T303": ErrorTexts(
        "what the program wrote cannot be claimed: a name or the target of a link is not UTF-8, a "
        "file cannot be read, there are too many files, or folders are too deep",
        '`capsule run --resume DIRECTORY --set \'trainer.outputs=["*", "!PATTERN"]\'`; a program '
        "that has ended is not run again",
    ),
    "CAP-T304": ErrorTexts(
        "the libraries' flags cannot be read back: a library crashes as it loads",
        "see `output.log`",
    ),
    "CAP-T305": ErrorTexts(
        "the source tree in the image or in the cache is not the locked one",
        "build the image again, or remove the unpacked trees from the cache",
    ),
    "CAP-T321": ErrorTexts(
        "a row of a policy's outputs depends on the other rows of its batch",
        "layers without batch statistics, or `determinism.batch_invariance: false`",
    ),
    "CAP-T331": ErrorTexts(
        "a process that plays actors died",
        "see `output.log`; a higher `limits.memory_mb` if memory ran out; then resume",
    ),
    "CAP-T332": ErrorTexts(
        "a process that plays actors, computes gradients or answers actors failed",
        "report it",
    ),
    "CAP-T341": ErrorTexts(
        "a schedule log is cut off, was changed, or says what no run can have done",
        "take it from the bundle, or the run directory, again",
    ),
    "CAP-T342": ErrorTexts(
        "the schedule recorded so far ends before the saved state",
        "start a new run",
    ),
    "CAP-T343": ErrorTexts(
        "the schedule log ends before the run does",
        "take the log of the whole run",
    ),
    "CAP-T344": ErrorTexts(
        "the schedule log is another run's",
        "follow a log with the spec that it was recorded with",
    ),
    "CAP-T351": ErrorTexts(
        "a node of the Ray cluster computes other bits than the machine that learns",
        "the same image on every node, a portable profile in `accelerator.numerics`, or a cluster "
        "without that node",
    ),
    "CAP-T352": ErrorTexts(
        "no connection to a Ray cluster at the address given",
        "see that its head runs with the same Python and Ray, and that `RAY_AUTH_TOKEN_PATH` "
        "names a file with its token",
    ),
    "CAP-T353": ErrorTexts(
        "the Ray cluster lost its head",
        "start a cluster, then resume; or resume without one",
    ),
    "CAP-T354": ErrorTexts(
        "a process that plays actors does not start in the Ray cluster, or is lost again and again",
        "`ray status` shows free processors, Ray's logs what ended it; then resume",
    ),
    "CAP-T361": ErrorTexts(
        "a process that computes gradients died",
        "see `output.log`; a higher `limits.memory_mb` if memory ran out; then resume",
    ),
    "CAP-T362": ErrorTexts(
        "a process that answers actors died",
        "see `output.log`; a higher `limits.memory_mb` if memory ran out; then resume",
    ),
    "CAP-T371": ErrorTexts(
        "a population's members are to play on a Ray cluster",
        "run it without a cluster",
    ),
    "CAP-T381": ErrorTexts(
        "a program does not repeat the recorded order of arrival: it waits for something else, or "
        "for more",
        "let it depend only on its inputs, its randomness and the order of arrivals; `capsule "
        "diagnose`",
    ),
    "CAP-T382": ErrorTexts(
        "a wait for arrivals has no name of its own, two readers, or two senders under one source",
        "name waits, let one thread or asyncio task read each, start coroutines with "
        "`arrivals.scoped()`",
    ),
    "CAP-T383": ErrorTexts(
        "a program has more arrivals than a log holds",
        "let each result or message carry more work",
    ),
    "CAP-T384": ErrorTexts(
        "a program that records the order of arrival was interrupted, and is to be resumed",
        "start it anew, or `trainer.resumable: false`",
    ),
    "CAP-T385": ErrorTexts(
        "an arrival log is malformed, or says what no run can have recorded",
        "take it from the bundle again; do not trust a bundle that holds it",
    ),
    "CAP-V074": ErrorTexts(
        "a dense record is malformed, or the two are of other updates",
        "make them again around the same step",
    ),
}
