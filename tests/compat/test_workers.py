"""The cores of several workers on a CPU: divided, or refused before vLLM is imported."""

import os
from pathlib import Path

import pytest
from serving import DEMO

from attnres_serve import cli
from attnres_serve.compat import device, openai_server, workers
from attnres_serve.compat.arguments import of_server
from attnres_serve.compat.device import Kind
from attnres_serve.errors import SettingError

# Logical processors by their cores, and those by their memory nodes.
TWO = {0: [[0], [1]]}
FOUR_WITH_TWINS = {0: [[0, 4], [1, 5], [2, 6], [3, 7]]}
TWO_NODES = {0: [[0], [2]], 1: [[1], [3]]}
EIGHT = {0: [[n] for n in range(8)]}


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for CPUs, and nothing said about cores."""
    for name in (workers.VARIABLE, workers.RESERVED, workers.NODES, workers.SIMULATED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Gives this process the processors of another machine, some of which it may use."""

    def has(machine: dict[int, list[list[int]]], *allowed: int) -> None:
        every = {n for cores in machine.values() for core in cores for n in core}
        for node, cores in machine.items():
            for core in cores:
                for n in core:
                    topology = tmp_path / f"cpu{n}" / "topology"
                    topology.mkdir(parents=True)
                    (tmp_path / f"cpu{n}" / f"node{node}").mkdir()
                    (topology / "thread_siblings_list").write_text(",".join(map(str, core)) + "\n")
        status = tmp_path / "status"
        status.write_text(f"Mems_allowed_list:\t{','.join(map(str, machine))}\n")
        monkeypatch.setattr(workers, "PROCESSORS", tmp_path)
        monkeypatch.setattr(workers, "STATUS", status)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*allowed} or every)

    return has


@pytest.mark.parametrize(
    ("machine", "allowed", "words", "value"),
    [
        (TWO, (), "", None),
        (TWO, (), "-tp 1 -pp 1", None),
        (TWO, (), "--tensor-parallel-size 2", "0|1"),
        (TWO, (), "-tp=2", "0|1"),
        (TWO, (), "--pipeline_parallel_size 2", "0|1"),
        (TWO, (), "--data-parallel-size 2", "0|1"),
        (TWO, (), "-dp 4 -dpl 2", "0|1"),
        (TWO, (), "-dp 2 --data-parallel-rank 1", None),  # the other is started by hand
        (TWO, (), "-tp 2 --nnodes 2", None),
        (EIGHT, (), "-tp 2 -pp 2 -dp 2", "0|1|2|3|4|5|6|7"),
        (EIGHT, (), "-tp 2", "0-2|4-6"),  # each leaves one for other processes, as vLLM has it
        (EIGHT, (), "-tp 3", "0|2-3|5-6"),
        (EIGHT, (1, 3, 5, 7), "-pp 2", "1|5"),
        (FOUR_WITH_TWINS, (), "-tp 2", "4|6"),
        (FOUR_WITH_TWINS, (), "-tp 4", "4|5|6|7"),
        (FOUR_WITH_TWINS, (0, 1, 2, 3), "-tp 4", "0|1|2|3"),
        (TWO_NODES, (), "-tp 2", None),  # vLLM gives each the cores of a node
        (TWO_NODES, (), "-tp 4", "0|2|1|3"),
        (TWO_NODES, (), "-dp 2", "0|1"),  # to which vLLM would give the same node
    ],
)
def test_cores_are_divided(has, monkeypatch, machine, allowed, words, value) -> None:
    has(machine, *allowed)
    for message in (None, "auto", " "):
        if message is not None:
            monkeypatch.setenv(workers.VARIABLE, message)
        assert workers.bind(of_server(words.split())) == value
        assert os.environ.get(workers.VARIABLE) == value
        monkeypatch.delenv(workers.VARIABLE, raising=False)


@pytest.mark.parametrize(("reserved", "value"), [("0", "0-3|4-7"), ("4", "0-1|4-5"), ("16", "0|4")])
def test_what_is_reserved_is_left(has, monkeypatch, reserved, value) -> None:
    has(EIGHT)
    monkeypatch.setenv(workers.RESERVED, reserved)
    assert workers.bind(of_server(["-tp", "2"])) == value


def test_nodes_that_are_not_to_be_seen_have_no_workers(has, monkeypatch) -> None:
    has(TWO_NODES)
    monkeypatch.setenv(workers.NODES, "1")
    assert workers.bind(of_server(["-tp", "2"])) == "1|3"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (workers.VARIABLE, "nobind", "-tp 2"),
        (workers.VARIABLE, "0|1", "-tp 2"),
        (workers.VARIABLE, "0-1|0,1", "-dp 2"),
        (workers.VARIABLE, " 0 | 1 ", "-pp 2"),
        (workers.VARIABLE, "1", ""),
        (workers.SIMULATED, "1", "-dp 2"),
    ],
)
def test_what_the_user_says_is_left_alone(has, monkeypatch, name, value, words) -> None:
    has(TWO)
    monkeypatch.setenv(name, value)
    assert workers.bind(of_server(words.split())) is None
    assert os.environ[name] == value


def test_another_device_is_left_alone(has, monkeypatch) -> None:
    has(TWO, 0)
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    assert workers.bind(of_server(["-tp", "8"])) is None


@pytest.mark.parametrize(
    ("allowed", "words", "message"),
    [
        ((0,), "-tp 2", r"^--tensor-parallel-size 2 asks for 2 workers .* may use 1 core \(0\), .*"
         r" set VLLM_CPU_OMP_THREADS_BIND='0\|0' to have them share it, slowly\.$"),
        ((), "-pp 3", r"^--pipeline-parallel-size 3 asks for 3 .* 2 cores \(0-1\), .*='0\|1\|0' "),
        ((1,), "-dp 2", r"^--data-parallel-size 2 asks for 2 workers .* 1 core \(1\), .*='1\|1' "),
        ((), "-tp 2 -pp 2", r"^--tensor-parallel-size 2 with --pipeline-parallel-size 2 asks for"),
    ],
)  # fmt: skip
def test_fewer_cores_than_workers_are_refused(has, allowed, words, message) -> None:
    has(TWO, *allowed)
    with pytest.raises(SettingError, match=message):
        workers.bind(of_server(words.split()))


@pytest.mark.parametrize(
    ("value", "words", "message"),
    [
        ("0", "-tp 2", r"'0', the cores of 1, and the number of workers on this machine is 2 "
         r"\(--tensor-parallel-size 2\); expected 2 lists of cores with \| between them, such as "
         r"'0\|1', or nobind\.$"),
        ("0|1", "", r"the cores of 2, and .* is 1; expected 1 list of cores, such as '0', or nob"),
        ("0|1|0", "-dp 2", r"the cores of 3, and .* is 2 \(--data-parallel-size 2\); expected 2 "),
        ("all", "-tp 2", r"'all', which are no lists of cores; expected 2 lists of cores with"),
        ("0|", "-tp 2", "which are no lists of cores; "),
        ("a-b|1", "-tp 2", "which are no lists of cores; "),
        ("3-1", "", "which are no lists of cores; "),
        ("0-999999999999", "", "which are no lists of cores; "),
        ("0|7", "-pp 2", r"'0\|7', and this process may not use core 7; expected 2 lists of"),
    ],
)  # fmt: skip
def test_lists_that_do_not_fit_are_refused(has, monkeypatch, value, words, message) -> None:
    """vLLM would raise in the engine, or leave threads unbound."""
    has(TWO)
    monkeypatch.setenv(workers.VARIABLE, value)
    with pytest.raises(SettingError, match=message):
        workers.bind(of_server(words.split()))


def test_this_machine_has_the_cores_that_this_process_may_use() -> None:
    result = [core for _, core in workers._cores()]
    assert result and {*result} <= os.sched_getaffinity(0)


def test_a_start_refuses_before_vllm_is_imported(has, monkeypatch, capfd) -> None:
    monkeypatch.setattr(openai_server, "run_server", lambda *args: pytest.fail("it started"))
    has(TWO, 1)
    assert cli.main(["serve", str(DEMO), "--tensor-parallel-size", "2", "--enforce-eager"]) == 2
    assert "VLLM_CPU_OMP_THREADS_BIND='1|1'" in capfd.readouterr().err


def test_a_start_tells_the_workers_of_vllm(has, monkeypatch) -> None:
    reported = []
    monkeypatch.setattr(
        openai_server, "run_server", lambda *args: reported.append(dict(os.environ))
    )
    has(TWO)
    assert cli.main(["serve", str(DEMO), "-tp", "2", "--enforce-eager", "--port", "0"]) == 0
    assert reported[0][workers.VARIABLE] == "0|1"


@pytest.mark.parametrize("words", ["-tp 0", "-pp=0", "-dp -1", "--nnodes 0", "-pcp 0"])
def test_no_workers_at_all(words) -> None:
    with pytest.raises(SettingError, match=r"found --[a-z-]+ -?\d; expected a whole number from 1"):
        workers.workers_of(of_server(words.split()))
