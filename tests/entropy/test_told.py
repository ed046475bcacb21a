"""Listings, the number of processors and names of temporary files under the interposer."""

import os
import subprocess
from pathlib import Path

import pytest

from capsule.entropy.journal import read_journal

HERE = Path(__file__).parent


# ---- listings ----


@pytest.fixture
def folder(tmp_path):
    """Return a folder whose file system has an order of its own, and its sorted names."""
    made = tmp_path / "folder"
    made.mkdir()
    names = [f"{number * 7919 % 10007}" for number in range(3000)]
    names += ["-begins-before-a-dot", "é", "Z", "a", "..hidden", "\udcff\udcfe"]
    for name in names:
        (made / name).touch()
    return made, sorted(map(os.fsencode, names))


def test_a_folder_is_listed_in_order_of_names(interposed, compiled, folder):
    path, names = folder
    lists = compiled(HERE / "lists.c")
    environment = interposed.environment(path.parent, listings="sorted")
    listed = subprocess.run([lists, path], env=environment, capture_output=True, check=True)
    assert listed.stdout.splitlines() == [b".", b"..", *names]


def test_the_file_system_has_another_order(interposed, folder):
    path, names = folder
    listed = interposed.python(
        "import os, sys; print([os.fsencode(n) for n in os.listdir(sys.argv[1])])", path
    )
    assert listed.output.strip() != str(names)


@pytest.mark.parametrize(
    "expression",
    [
        "os.listdir(path)",
        "[entry.name for entry in os.scandir(path)]",
        "os.listdir(os.open(path, os.O_RDONLY))",
        "[name for _, _, names in os.walk(path) for name in names]",
        "[one.name for one in pathlib.Path(path).iterdir()]",
        (
            "subprocess.check_output(['find', '.', '-type', 'f', '-printf', '%f|'], cwd=path)[:-1]"
            ".decode(errors='surrogateescape').split('|')"
        ),
    ],
)
def test_python_and_its_children_list_in_order_of_names(interposed, folder, expression):
    path, names = folder
    code = f"import os, pathlib, subprocess, sys; path = sys.argv[1]; names = {expression}\n"
    code += "print([os.fsencode(name) for name in names])"
    finished = interposed.python(code, path, listings="sorted")
    assert finished.output.strip() == str(names)


def test_a_folder_can_be_emptied_while_it_is_listed(interposed, folder):
    path, names = folder
    code = (
        "import os, shutil, sys\n"
        "print(sum(not os.unlink(entry.path) for entry in os.scandir(sys.argv[1])))\n"
        "os.mkdir(sys.argv[1] + '/sub'); shutil.rmtree(sys.argv[1])\n"
    )
    assert interposed.python(code, path, listings="sorted").output == f"{len(names)}\n"
    assert not path.exists()


def test_threads_list_folders_at_the_same_time(interposed, folder):
    code = (
        "import os, sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    lists = list(pool.map(os.listdir, 40 * sys.argv[1:]))\n"
        "print(len(lists), len(set(map(tuple, lists))))\n"
    )
    assert interposed.python(code, folder[0], listings="sorted").output == "40 1\n"


def test_listings_are_counted(interposed, folder):
    code = "import os, sys; [os.listdir(sys.argv[1]) for _ in range(5)]"
    counts = {}
    for listings in ("sorted", "system"):
        finished = interposed.python(code, folder[0], listings=listings)
        told = read_journal(finished.directory).told
        counts[listings] = sum(process.listings for process in told if process.sorted)
    assert counts["sorted"] >= 5
    assert counts["system"] == 0


# ---- processors ----

QUESTIONS = (
    "import ctypes, mmap, os, subprocess, threading\n"
    "libc = ctypes.CDLL(None, use_errno=True)\n"
    "mask = (ctypes.c_ulong * 16)()\n"
    "size = libc.syscall(204, 0, 128, mask)\n"
    "print(os.cpu_count(), len(os.sched_getaffinity(0)), libc.get_nprocs(),\n"
    "      libc.get_nprocs_conf(), bin(mask[0]).count('1'), size,\n"
    "      os.sysconf('SC_NPROCESSORS_CONF'), subprocess.getoutput('nproc --all; nproc'))\n"
)


@pytest.mark.parametrize("cores", [1, 3, 100])
def test_programs_are_told_the_number_of_processors(interposed, cores):
    finished = interposed.python(QUESTIONS, cores=f"{cores}", omp_num_threads="1")
    words = finished.output.split()
    assert words[5] == f"{(cores + 63) // 64 * 8}"
    assert words[:4] + words[6:8] == 6 * [f"{cores}"]
    told = read_journal(finished.directory).told
    assert {process.cores for process in told} == {cores}
    assert sum(process.core_questions for process in told) >= 7


def test_the_machines_number_is_told_where_none_is_set(interposed):
    words = interposed.python(QUESTIONS).output.split()
    assert words[0] == f"{os.cpu_count()}"
    assert words[1] == f"{len(os.sched_getaffinity(0))}"


def test_a_choice_of_processors_reads_back_and_does_no_harm(interposed):
    code = (
        "import ctypes, os, threading\n"
        "os.sched_setaffinity(0, {1, 2, 99})\n"
        "print(os.sched_getaffinity(0))\n"
        "thread = threading.Thread(target=lambda: print(os.sched_getaffinity(0)))\n"
        "thread.start(); thread.join()\n"
        "try: os.sched_setaffinity(0, {99})\n"
        "except OSError as error: print(error.strerror)\n"
        "print(os.sched_getaffinity(0), os.sched_getaffinity(os.getppid()))\n"
        "try: os.sched_getaffinity(1 << 30)\n"
        "except OSError as error: print(error.strerror)\n"
        "try: os.sched_setaffinity(1 << 30, {0})\n"
        "except OSError as error: print(error.strerror)\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.sched_setaffinity(0, 128, 8), os.strerror(ctypes.get_errno()))\n"
        "print(libc.sched_getaffinity(0, 128, 8), os.strerror(ctypes.get_errno()))\n"
        "print(libc.sched_getaffinity(0, 128, None), os.strerror(ctypes.get_errno()))\n"
        "thread = ctypes.c_ulong(threading.get_ident())\n"
        "print(os.strerror(libc.pthread_getaffinity_np(thread, 128, ctypes.c_void_p(8))))\n"
        "print(open('/proc/self/status').read().split('Cpus_allowed_list:\\t')[1].split()[0])\n"
    )
    lines = interposed.python(code, cores="4").lines
    assert lines[:3] == ["{1, 2}", "{1, 2}", "Invalid argument"]
    assert lines[3:5] == ["{1, 2} {0, 1, 2, 3}", "No such process"]
    assert lines[5:10] == ["No such process", *3 * ["-1 Bad address"], "Bad address"]
    status = Path("/proc/self/status").read_text()
    assert lines[10] == status.split("Cpus_allowed_list:\t")[1].split()[0]


def test_a_thread_runs_on_the_first_processor(interposed):
    code = (
        "import ctypes\n"
        "libc, numbers = ctypes.CDLL(None), [ctypes.c_uint(9), ctypes.c_uint(9)]\n"
        "libc.getcpu(*map(ctypes.byref, numbers))\n"
        "print(libc.sched_getcpu(), *(number.value for number in numbers))\n"
        "numbers = [ctypes.c_uint(9), ctypes.c_uint(9)]\n"
        "libc.syscall(309, *map(ctypes.byref, numbers))\n"
        "print(*(number.value for number in numbers))\n"
    )
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        assert interposed.python(code, cores="4").lines == ["0 0 0", "0 0"]
    finally:
        os.sched_setaffinity(0, allowed)


# ---- names of temporary files ----


def test_names_of_temporary_files_are_drawn(interposed):
    """By the C library's functions and by Python's own module."""
    code = (
        "import ctypes, tempfile\n"
        "libc = ctypes.CDLL(None)\n"
        "for make in (libc.mkstemp, libc.mkdtemp):\n"
        "    path = ctypes.create_string_buffer(b'made-XXXXXX'); make(path); print(path.value)\n"
        "print(tempfile.mkdtemp(dir='.'))\n"
    )
    runs = []
    for _ in range(2):
        folder = interposed.folder / f"within-{len(runs)}"
        folder.mkdir()
        runs.append(interposed.python(code, cwd=folder).output)
        assert len(list(folder.iterdir())) == 3
    assert runs[0].replace("within-0", "") == runs[1].replace("within-1", "")


def test_a_name_that_is_taken_is_not_given_again(interposed, tmp_path):
    code = "import ctypes; ctypes.CDLL(None).mkstemp(ctypes.create_string_buffer(b'XXXXXX'))"
    for _ in range(3):
        interposed.python(code, cwd=tmp_path)
    assert len([one for one in tmp_path.iterdir() if len(one.name) == 6 and one.is_file()]) == 3
