"""Tests of runs with several processes: the same training as one process, and a common end."""

import contextlib
import csv
import functools
import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from sympow_jax import config, data, evaluation
from sympow_jax.commands import command_line, launch
from sympow_jax.data.corpus import pieces
from sympow_jax.data.sources import corpus as corpora
from sympow_jax.process import hosts, signals, workdir
from sympow_jax.training import sharding
from tests.data import builders
from tests.training import small
from tools import launching


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("corpus")
    for index in range(20):
        (folder / f"{index}.txt").write_text(f"{index}: the quick brown fox jumps over the lazy dog. " * 4)
    return folder


@pytest.fixture(scope="module")
def arguments(corpus) -> list[str]:
    return [
        f"--config=configs/text.py:{corpus}/*.txt",
        *launching.SMALLEST,
        "--config.optimizer.learning_rate=1e-2",
        "--config.optimizer.warmup_steps=0",
        "--config.optimizer.schedule=constant",
        "--config.training.checkpoint_every=4",
        "--config.training.steps=10",
    ]


EVALUATION = "--config.evaluation.context_lengths=8,32"


@pytest.fixture
def start(tmp_path, arguments):
    def begin(*more: str, folder: pathlib.Path = tmp_path / "run", **options) -> list[launching.Started]:
        return launching.start(
            [*arguments, f"--workdir={folder}", *more],
            tmp_path / "says",
            **{"cache": jax.config.jax_compilation_cache_dir, **options},
        )

    return begin


@pytest.fixture(scope="module")
def alone(arguments, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert launch.main([*arguments, EVALUATION, f"--workdir={folder}"]) == 0
    return folder


def _losses(folder: pathlib.Path) -> dict[int, float]:
    return small.losses(folder) if (folder / "metrics.jsonl").exists() else {}


def _saved(folder: pathlib.Path) -> list[int]:
    return sorted(int(path.name) for path in folder.glob("checkpoints/*") if path.name.isdigit())


def _evaluated(folder: pathlib.Path) -> list[float]:
    with (folder / "context_loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def _record_rows(folder: pathlib.Path) -> None:
    """Makes this process record the rows it reads of each batch, the held-out one first."""
    place = sharding.place_batch

    def record(batch, mesh):
        index = hosts.jax.process_index()
        np.save(folder / f"{index}.{len(list(folder.glob(f'{index}.*')))}.npy", batch["inputs"])
        return place(batch, mesh)

    sharding.place_batch = record


def _assert_same_run(folder: pathlib.Path, alone: pathlib.Path) -> None:
    expected = _losses(alone)
    assert _losses(folder) == pytest.approx(expected, rel=1e-5)
    assert list(_losses(folder)) == list(expected)
    assert expected[10] < 0.9 * expected[1]


@pytest.mark.robust
def test_two_processes_equal_one(start, alone, arguments, tmp_path):
    rows = tmp_path / "rows"
    rows.mkdir()
    started = start(EVALUATION, processes=2, before_start=functools.partial(_record_rows, rows))
    assert [one.wait() for one in started] == [0, 0]
    _assert_same_run(tmp_path / "run", alone)
    heldout, expected = (
        [line["heldout_loss"] for line in small.lines(folder)] for folder in (tmp_path / "run", alone)
    )
    assert heldout == pytest.approx(expected, rel=1e-5)
    assert _evaluated(tmp_path / "run") == pytest.approx(_evaluated(alone), rel=1e-5)
    assert _saved(tmp_path / "run") == [4, 8, 10]
    assert started[0].said()[-1].startswith("next: ")
    assert started[1].said() == []

    settings, _, _ = command_line.parse_training([*arguments, "--workdir=unused"])
    whole = data.train_dataset(settings.data, vocab_size=256).batches(4)
    for number, batch in zip(range(10), whole):
        for process in range(2):
            read = np.load(rows / f"{process}.{number + 1}.npy")  # after the held-out batch
            np.testing.assert_array_equal(read, batch["inputs"][2 * process : 2 * process + 2])


def _use_small_groups(patch: Callable = setattr) -> None:
    patch(pieces, "GROUP_BYTES", 500)
    patch(corpora, "_ROWS", 0)


def _record_rows_of_small_groups(folder: pathlib.Path) -> None:
    _use_small_groups()
    _record_rows(folder)


@pytest.mark.robust
def test_processes_divide_a_corpus_and_resume_in_other_numbers(start, arguments, tmp_path, monkeypatch):
    texts = [f"{index}: the quick brown fox jumps over the lazy dog. " * 4 for index in range(60)]
    path = builders.write_jsonl(tmp_path / "a.jsonl", texts)
    flags = ["--config.data.source=jsonl", f"--config.data.paths={path}", "--config.data.tokenizer_workers=0"]
    _use_small_groups(monkeypatch.setattr)
    settings, _, _ = command_line.parse_training([*arguments, *flags, "--workdir=unused"])
    assert data.describe(settings.data)["streams"] == 4
    whole = data.train_dataset(settings.data, vocab_size=256).batches(4)
    for first, last, processes in ((1, 3, 2), (4, 6, 1), (7, 10, 4)):
        rows = tmp_path / f"{processes}"
        rows.mkdir()
        record = functools.partial(_record_rows_of_small_groups, rows)
        started = start(*flags, f"--config.training.steps={last}", processes=processes, before_start=record)
        assert [one.wait() for one in started] == [0] * processes, started[0].errors()
        for number, batch in zip(range(first, last + 1), whole):
            # After the held-out batch.
            read = [np.load(rows / f"{process}.{number - first + 1}.npy") for process in range(processes)]
            np.testing.assert_array_equal(np.concatenate(read), batch["inputs"])


@pytest.mark.slow
def test_four_processes_of_two_devices(start, alone, tmp_path):
    sharded = ("--config.sharding.fsdp=2", "--config.sharding.tensor=2")
    started = start("--config.training.steps=6", *sharded, processes=4, devices=2)
    assert [one.wait() for one in started] == [0] * 4
    started = start(processes=2, devices=2)
    assert [one.wait() for one in started] == [0] * 2
    _assert_same_run(tmp_path / "run", alone)


@pytest.mark.robust
def test_a_signal_to_one_of_two_and_a_second_run(start, tmp_path, arguments):
    folder = tmp_path / "run"
    started = start("--config.training.steps=1000000", processes=2)
    launching.wait_until(lambda: bool(_saved(folder)), started)

    (second,) = start("--config.training.steps=1000000")
    assert second.wait() == 1
    (line,) = second.errors()
    assert line.startswith(f"error: {folder} is in use by process {started[0].process.pid} on ")
    assert _losses(folder)
    assert evaluation.evaluate_runs([folder], [8], out=tmp_path / "out")

    started[1].send(signal.SIGTERM)
    assert [one.wait() for one in started] == [143, 143]
    said = started[0].said()[-1]
    assert said.startswith("stopped after step ")
    stopped = int(said.split()[3].rstrip(","))
    assert _saved(folder)[-1] == stopped
    assert list(_losses(folder)) == list(range(1, stopped + 1))
    assert [one.errors() for one in started] == [[], [signals.SAVING]]


@pytest.mark.robust
def test_settings_that_differ(start, tmp_path):
    started = start(processes=2, more=[[], ["--config.optimizer.learning_rate=0.5"]])
    assert [one.wait() for one in started] == [1, 1]
    for one in started:
        (line,) = one.errors()[:1]
        assert line == (
            "error: process 1 has different settings or packages from process 0: optimizer.learning_rate is 0.5 not "
            "0.01; they must be the same"
        )
    assert not (tmp_path / "run").exists()


def _fail_in_process_1() -> None:
    place = sharding.place_batch
    placed = []

    def fail(batch, mesh):
        placed.append(batch)
        if hosts.jax.process_index() == 1 and len(placed) == 7:
            raise ValueError("row 7 cannot be read")
        return place(batch, mesh)

    sharding.place_batch = fail


@pytest.mark.robust
def test_a_mistake_in_one_process_ends_both(start, tmp_path):
    started = start(processes=2, before_start=_fail_in_process_1)
    codes = [one.wait() for one in started]
    assert codes[1] == 1
    assert codes[0] != 0
    assert "error: row 7 cannot be read" in started[1].errors()
    assert _saved(tmp_path / "run") == [4]


def _hurried() -> None:
    """Makes Orbax wait for other processes for 20 seconds in a save, in place of 20 minutes."""
    context = ocp.Context()
    context.asynchronous.timeout_secs = 20
    context.__enter__()


def _small_files() -> None:
    _hurried()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.slow
def test_a_save_that_fails_in_one_process_ends_both(start, tmp_path):
    # Two processes each write their half of parameters that are too large for one; one of them cannot.
    wide = ("--config.model.width=128", "--config.training.steps=1000000")
    started = start(*wide, processes=2, cache=None, before_start=[_small_files, _hurried])
    assert started[0].wait() == 1
    (line,) = started[0].errors()
    assert line.startswith(f"error: a checkpoint could not be saved in {tmp_path / 'run' / 'checkpoints'}: ")
    assert started[1].wait() != 0


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [True, False])
def test_a_checkpoint_that_one_process_cannot_read(start, alone, tmp_path, damaged):
    """Damage is moved away by all; a file that cannot be opened ends both, and moves nothing."""
    folder, sharded = tmp_path / "run", "--config.sharding.fsdp=2"
    started = start(sharded, "--config.training.steps=8", processes=2)
    assert [one.wait() for one in started] == [0, 0]
    (path,) = folder.glob("checkpoints/8/params/ocdbt.process_1/d/*")
    if damaged:
        path.write_bytes(path.read_bytes()[:10])
    else:
        path.unlink()
        path.symlink_to(path)
    started = start(sharded, processes=2)
    assert [one.wait() for one in started] == [not damaged] * 2
    first, second = (one.errors() for one in started)
    if damaged:
        assert "the checkpoint of step 8" in first[0]
        assert "moved the damaged checkpoint of step 8" in first[1]
        assert second == []
        assert any(line.startswith("training: step 4 of 10") for line in started[0].said())
        _assert_same_run(folder, alone)
        return
    for lines in (first, second):
        # JAX may add lines of its own, when it misses the other process.
        (line,) = (line for line in lines if line.startswith("error: "))
        assert f"{path}: Too many levels of symbolic links" in line
    assert _saved(folder) == [4, 8]
    assert not (folder / "damaged_checkpoints").exists()


@pytest.mark.robust
def test_processes_that_do_not_meet(start):
    port = launching.free_port()
    flags = f"--coordinator_address=localhost:{port}", "--process_count=2", "--coordinator_timeout=2"
    for index in range(2):
        (alone,) = start(*flags, f"--process_id={index}")
        assert alone.wait(60) == 1
        (line,) = alone.errors()
        assert line.startswith(
            f"error: not all processes of the run have met at localhost:{port}, where process 0"
        )
    with launching.socket.create_server(("", 0)) as other:
        taken = f"--coordinator_address=localhost:{other.getsockname()[1]}"
        (blocked,) = start(*flags, "--process_id=0", taken)
        assert blocked.wait() == 1
    (line,) = blocked.errors()
    assert "Address already in use" in line


def test_flags_of_a_process():
    def parse(flags: str) -> hosts.Launch | None:
        return command_line.parse_training(["--config=quickstart", "--workdir=unused", *flags.split()])[2]

    found = parse("--coordinator_address=[::1]:1234 --process_count=2 --process_id=1")
    assert found == hosts.Launch(coordinator="[::1]:1234", count=2, index=1, timeout=60)
    for flags, message in (
        ("--coordinator_address=a --process_count=2 --process_id=0", "it must be HOST:PORT"),
        ("--coordinator_address=a:99999 --process_count=2 --process_id=0", "it must be HOST:PORT"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(flags)


_SLURM = {"SLURM_JOB_ID": "5000", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
_ALL = hosts.Launch(devices=(), timeout=9)
_CHOSEN = hosts.Launch(timeout=9)


def test_clusters(monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "_TPU_DEVICES", (str(tmp_path),))
    for environment, packages, expected in (
        ({}, (), None),
        ({"SLURM_JOB_ID": "5000", "SLURM_NTASKS": "2"}, (), None),  # not started by srun
        (_SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, (), None),
        (_SLURM, (), _CHOSEN),
        (_SLURM | {"SLURM_STEP_NUM_NODES": "2"}, (), _ALL),
        (_SLURM | {"CUDA_VISIBLE_DEVICES": "0,1"}, (), _CHOSEN),
        (_SLURM | {"CUDA_VISIBLE_DEVICES": "1"}, (), _ALL),
        (_SLURM | {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "a100:2"}, (), _ALL),
        (_MPI, (), _CHOSEN),
        (_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, (), _ALL),
        (_POD, (), None),
        (_POD, ("kubernetes",), _CHOSEN),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ("kubernetes",), None),  # not of an indexed job
        ({}, ("libtpu",), _CHOSEN),
    ):
        monkeypatch.setattr(hosts.importlib.util, "find_spec", lambda name, found=packages: name in found)
        assert hosts.detect(environment, timeout=9) == expected, environment


def _have_devices(number: int) -> None:
    hosts.jax.config.update("jax_num_cpu_devices", number)


@pytest.mark.robust
def test_numbers_of_devices_that_differ(start):
    # The second process has a third of all devices.
    started = start(
        processes=3, before_start=[functools.partial(_have_devices, number) for number in (1, 2, 3)]
    )
    assert [one.wait() for one in started] == [1, 1, 1]
    expected = (
        "error: the processes must have the same number of devices; process 0 has 1 and process 2 has 3"
    )
    assert [one.errors()[:1] for one in started] == [[expected]] * 3


def _start_by_slurm(index: int) -> None:
    step = _SLURM | {"SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    os.environ.update(step | {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)})


@pytest.mark.robust
def test_processes_of_a_slurm_step_meet(start, tmp_path):
    before_start = [functools.partial(_start_by_slurm, index) for index in range(2)]
    started = start("--config.training.steps=2", processes=2, flags=False, before_start=before_start)
    assert [one.wait() for one in started] == [0, 0], started[0].errors()
    assert "devices: 2 x cpu of 2 processes: data 2" in started[0].said()
    assert started[1].said() == []
    assert list(_losses(tmp_path / "run")) == [1, 2]


def test_an_error_of_any_type_while_connecting_is_one_line(monkeypatch):
    class ConfigException(Exception):
        """Exception with the name and fields of that of the package `kubernetes`."""

    def fail(*_, **options):
        raise ConfigException("Service host/port\nis not set.")

    monkeypatch.setattr(hosts.jax.config, "update", lambda *_: None)
    monkeypatch.setattr(hosts.jax.distributed, "initialize", fail)
    before = threading.enumerate()
    with pytest.raises(ValueError, match=r"the processes: Service host/port is not set\.; without a cluster"):
        hosts.join(hosts.Launch())
    begun = [thread for thread in threading.enumerate() if thread not in before]
    assert all(timer.finished.is_set() for timer in begun)


def test_texts_that_are_not_utf8_reach_all_processes(monkeypatch):
    monkeypatch.setattr(hosts.jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        hosts.multihost_utils, "process_allgather", lambda mine: np.stack([mine, np.zeros_like(mine)])
    )
    assert hosts.gather("a é\udcff") == ["a é\\udcff", ""]
    with pytest.raises(OSError, match="caf\udce9"), hosts.all_or_none():
        raise OSError("caf\udce9 cannot be read")


def test_one_process_agrees_with_itself():
    assert hosts.gather("a line") == ["a line"]
    hosts.check_same("settings", {"a": 1})
    assert hosts.Vote().cast(15) == 15
    with pytest.raises(KeyError), hosts.all_or_none():
        raise KeyError("as it is")


def test_a_workdir_in_use(tmp_path):
    hold = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); print(); input()"
    )
    path = tmp_path / "lock"
    path.write_text("process 7 on node3, started at noon\n")
    with subprocess.Popen(
        [sys.executable, "-c", hold, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"\n"
        with pytest.raises(ValueError, match="is in use by process 7 on node3, started at noon; wait until"):
            workdir.open_workdir(tmp_path, config.load("configs/quickstart.py"))
        holder.kill()
    workdir.open_workdir(tmp_path, config.load("configs/quickstart.py"))
    assert path.read_text().startswith(f"process {hosts.os.getpid()} on ")


@pytest.mark.parametrize("abandons", [False, True])
def test_a_failed_process_with_threads_that_do_not_end(monkeypatch, abandons):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    for fails in (abandons, False):  # a later use is not affected
        ended.clear()
        with contextlib.suppress(SystemExit), hosts.ending():
            if fails:
                hosts.abandon_threads()
            raise SystemExit(1)
        assert ended == [1] * fails


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            "UNKNOWN: Gloo all-reduce failed:\nConnection reset by peer",
            "error: another process of the run has ended or cannot be reached: UNKNOWN: Gloo all-reduce failed: ",
        ),
        ("RESOURCE_EXHAUSTED: Out of memory", "Traceback (most recent call last):"),
    ],
)
def test_an_unreachable_process_is_one_line(monkeypatch, capsys, error, expected):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with hosts.ending():
        raise jax.errors.JaxRuntimeError(error)
    assert ended == [1]
    said = capsys.readouterr().err
    assert said.startswith(expected)
    assert said.startswith("Traceback") or (said.count("\n") == 1 and "; see what the others said" in said)
