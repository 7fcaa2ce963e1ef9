"""The model of the kernels on a GPU: parts on instructions of known cost, anchors, figures on file.

It does not run where Triton is interpreted, so what compiles is a process of its own.
"""

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import triton_interpreter  # noqa: F401  # the other modules' kernels are interpreted in this process
from serving import ROOT

from attnres_serve.kernels.triton import common, mix_group, score_group, two_phase
from attnres_serve.model import backend
from benchmarks.common import RESULTS
from benchmarks.kernels.model import anchors, issue, machine, sass
from benchmarks.kernels.model.__main__ import HIDDEN, ROWS, SITES, TOKENS
from benchmarks.kernels.model.machine import GPUS
from benchmarks.kernels.model.sass import NONE, Instruction
from benchmarks.published import tables

ON_FILE = json.loads((RESULTS / "gpu-model.json").read_text())
PLENTY = 1e9  # bytes a cycle


def one(name: str, address: int = 0, target: int | None = None, **scheduling: int) -> Instruction:
    usual = {"stall": 1, "wait": 0, "releases": NONE, "frees": NONE}
    return Instruction(address, False, name, target, **(usual | scheduling))


def run(code: list[Instruction], warps: int, rate: float = PLENTY, moved: float = 0.0) -> float:
    """Cycles of one program."""
    work = issue.Work.of(code, warps, moved, [bool(moved)] * len(code))
    return issue.cycles([work], [0], 1, rate)


# The parts.


def test_the_compilers_scheduling_is_read() -> None:
    """Lines as cuobjdump prints them, with their high halves."""
    lines = """
        /*0080*/              @P0 LDG.E.128 R4, desc[UR8][R2.64] ;  /* 0x0000000a080472a5 */
                                                                    /* 0x001ea4000f8e003f */
        /*0090*/                  BRA 0x80 ;                        /* 0x0000000000797919 */
                                                                    /* 0x000ff00000000800 */"""
    load, branch = sass.parse(lines)
    assert load == (0x80, True, "LDG.E.128", None, 2, 1, 2, NONE, None)
    assert (load.opcode, load.bytes) == ("LDG", 16)
    assert branch == (0x90, False, "BRA", 0x80, 8, 0, NONE, NONE, None)
    lines = lines.replace("BRA 0x80 ;", "DEPBAR.LE SB0, 0x2 ;")
    assert sass.parse(lines)[1].left == 2


def test_a_path_has_each_loop_as_often_as_it_says() -> None:
    """A loop in a loop; one without rounds is skipped by the branch in front of it."""
    code = [
        one("MOV", 0),
        Instruction(16, True, "BRA", 80, 1, 0, NONE, NONE),  # around both loops
        one("FADD", 32),
        one("FMUL", 48),
        Instruction(56, True, "BRA", 48, 1, 0, NONE, NONE),
        Instruction(64, True, "BRA", 32, 1, 0, NONE, NONE),
        one("EXIT", 80),
        one("BRA", 96, 96),  # behind the code, to itself
    ]
    assert sass.loops(code) == [32, 48]
    names = [i.name for i in sass.path(code, [2, 3]) if i.opcode != "BRA"]
    assert names == ["MOV", *(["FADD"] + ["FMUL"] * 3) * 2, "EXIT"]
    assert [i.name for i in sass.path(code, [0, 3])] == ["MOV", "BRA", "EXIT"]
    around = [code[0], Instruction(8, True, "BRA", 80, 1, 0, NONE, NONE), *code[1:]]
    assert [i.name for i in sass.path(around, [0, 3])] == ["MOV", "BRA", "BRA", "EXIT"]
    assert [i.name for i in sass.path(around, [None, 3])] == ["MOV", "BRA", "EXIT"]
    with pytest.raises(ValueError, match="has 2 loops, not 1"):
        sass.path(code, [1])


@pytest.mark.parametrize(("skipped", "taken"), [("BAR", True), ("FADD", False)])
def test_a_sum_that_is_rare_is_skipped(skipped: str, taken: bool) -> None:
    """A branch around a barrier is taken; around an instruction or two it is not."""
    branch = Instruction(0, True, "BRA", 32, 1, 0, NONE, NONE)
    names = [i.name for i in sass.path([branch, one(skipped, 16), one("EXIT", 32)], [])]
    assert names == ["BRA", *[skipped] * (not taken), "EXIT"]


@pytest.mark.parametrize(
    ("name", "warps", "each"),
    [("FFMA", 16, 4), ("IADD3", 16, 8), ("MUFU.RSQ", 8, 16), ("SHFL.BFLY", 16, 16)],
)
def test_a_pipe_has_its_rate(name: str, warps: int, each: int) -> None:
    """A hundred instructions of every warp; a shuffle's pipe is shared by all schedulers."""
    assert run([one(name)] * 100, warps) == pytest.approx(100 * each, rel=0.05)


def test_a_warp_waits_for_its_load_and_others_go_on() -> None:
    """A load's latency is paid once, however many warps load."""
    code = [one("LDG.E", releases=0), one("FADD", wait=1)]
    assert run(code, 1) == pytest.approx(machine.L2_LATENCY, abs=10)
    assert run(code, 8) == pytest.approx(machine.L2_LATENCY, abs=30)
    assert run(code, 1, moved=128.0) == pytest.approx(machine.HBM_LATENCY, abs=10)


def test_stalls_and_barriers_hold_a_warp_back() -> None:
    assert run([one("FADD", stall=13)] * 10, 1) == pytest.approx(130, abs=13)
    code = [one("BAR.SYNC"), one("FADD")] * 10
    assert run(code, 4) == pytest.approx(10 * machine.BARRIER, rel=0.2)


def test_memory_gives_what_it_has() -> None:
    """Programs that follow one another move their bytes at the rate, and no faster."""
    code = [one("LDG.E.128", releases=0), one("FADD", wait=1)]
    work = issue.Work.of(code, 4, 4 * 512.0, [True, False])
    assert issue.cycles([work], [0] * 400, 8, 8.0) == pytest.approx(400 * 4 * 512 / 8.0, rel=0.05)


def test_programs_of_two_kinds_share_an_sm() -> None:
    """One computes while the other's bytes move: together they take as long as the longer."""
    moves = issue.Work.of([one("LDG.E.128", releases=0), one("FADD", wait=1)], 4, 2048.0, [1, 0])
    computes = issue.Work.of([one("FFMA")] * 200, 4, 0.0, [False] * 200)
    works, rate = [moves, computes], 8.0
    both = issue.cycles(works, [0, 1] * 50, 8, rate)
    assert both == pytest.approx(50 * 2048 / rate, rel=0.05)
    assert issue.cycles(works, [1] * 50, 8, rate) < 0.9 * both


def test_a_wait_for_copies_ends_when_the_groups_before_have_arrived() -> None:
    """Of two groups, either both or the first."""
    copy, commit = one("LDGSTS.E.BYPASS.128"), one("LDGDEPBAR")
    waits = [one("DEPBAR.LE")._replace(left=left) for left in (0, 1, 2)]
    late = [copy, commit, *[one("FADD")] * 400, copy, commit]
    both, first, none = (run([*late, wait, one("FADD")], 1) for wait in waits)
    assert both == pytest.approx(400 + machine.L2_LATENCY, abs=20)
    assert first == none == pytest.approx(403, abs=5)
    assert run([copy, commit, waits[1], one("FADD")], 1) < 20  # one may be under way
    assert run([copy, commit, waits[0]], 1) < 20  # nothing follows that would wait


# What compiles.


def compiled(expression: str) -> Any:
    """An expression's value in a process where Triton is not interpreted."""
    code = (
        "import json; from benchmarks.kernels.model import anchors, launches, sass, shapes\n"
        "from benchmarks.kernels.model.__main__ import block_rows, config_rows\n"
        f"print(json.dumps({expression}))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def reproduces(numbers: list[int]) -> None:
    found = compiled(
        f"[anchors.model_us(anchors.ANCHORS[i], anchors.installed()) for i in {numbers}]"
    )
    for number, us in zip(numbers, found, strict=True):
        anchor = anchors.ANCHORS[number]
        assert us == pytest.approx(anchor.measured_us, rel=anchor.within), anchor


needs_vllms_file = pytest.mark.skipif(anchors.installed() is None, reason="no vLLM has the kernel")


@needs_vllms_file
@pytest.mark.timeout(600)
def test_published_figures_are_reproduced() -> None:
    """In decode and in prefill."""
    reproduces([7, 11])


@needs_vllms_file
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_every_published_figure_is_reproduced() -> None:
    reproduces(list(range(len(anchors.ANCHORS))))


@pytest.mark.timeout(600)
def test_a_merge_is_taken_to_reduce_once() -> None:
    """Of its barriers, those of a second sum stand in a branch that is rare."""
    barriers = compiled(
        "[[sum(one.opcode == 'BAR' for one in some)"
        " for some in (made.code, sass.path(made.code, []))]"
        " for hidden in (1024, 4096) for made in [launches.binary('merge', hidden)]]"
    )
    assert barriers == [[3, 1]] * 2


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_path_has_every_row_once() -> None:
    """A loop that the compiler unrolled, or one that is skipped, would show in the bytes."""
    found = compiled(
        "[sum(32 * one.bytes for one in sass.path(binary.code, rounds)"
        " if one.bytes == 16 and one.opcode in ('LDG', 'STG')) * binary.warps / 2048"
        " for launch in (launches.Launch('single_pass', 1024, 7),"
        " launches.Launch('mix_scored', 1024, 7), launches.Launch('merge', 1024, 7),"
        " launches.Launch('open_group', 1024, 6, 8), launches.Launch('score', 1024, 1, 8),"
        " launches.Launch('open_group', 1024, 0, 8))"
        " for binary in [launch.binary()] for tokens in (1000, 1)"
        " if tokens > 1 or launch.kernel == 'open_group' for rounds in launch.rounds(tokens)]"
    )
    sites = two_phase.GROUP_CONFIGS[1024].sites
    turns = 8 // sites
    # A tile more than there are, delta, old and new sum, query (two rows), weight, result.
    tile = common.config_for(1024).tile
    whole = (-(-7 // tile) + 1) * tile + 7

    def first(rows: int) -> int:
        return rows + 1 + 2 + 2 * sites + 1 + 2 + sites - 1

    def later(rows: int) -> int:
        return rows + 2 + 3 * sites

    adds = 3
    assert found[:3] == [whole, whole, 8]
    assert found[3:6] == [first(6) + (turns - 1) * later(6), first(6), adds + later(6)]
    assert found[6:] == [2 + 2 * 4, first(0) + (turns - 1) * later(0), first(0), adds + later(0)]


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_the_figures_on_file_are_those_of_the_code() -> None:
    assert compiled("block_rows([1024])") == [b for b in ON_FILE["blocks"] if b["hidden"] == 1024]
    assert compiled("config_rows()") == ON_FILE["configs"]
    assert compiled("shapes.rows()") == ON_FILE["shapes"]


# The figures on file.


def test_what_is_on_file_says_what_it_is() -> None:
    assert ON_FILE["kind"] == "model, not measured"
    assert {"triton", "ptxas", "torch", "python"} < ON_FILE["versions"].keys()
    wanted = {(d, n, s) for d in HIDDEN for n in ROWS for s in SITES}
    assert {(b["hidden"], b["rows"], b["sites"]) for b in ON_FILE["blocks"]} == wanted
    for block in ON_FILE["blocks"]:
        single = block["microseconds"]["single_pass"]
        assert single.keys() == GPUS.keys()
        for name, ratios in block["over_single_pass"].items():
            for gpu, by_tokens in ratios.items():
                assert by_tokens.keys() == {*map(str, TOKENS), "1 from L2"}
                for at, ratio in by_tokens.items():
                    us = block["microseconds"][name][gpu][at]
                    assert ratio == pytest.approx(us / single[gpu][at], abs=1e-3)


def test_the_configs_on_file_are_those_of_the_tables() -> None:
    """Whoever changes a table computes the figures anew."""
    for launch in ON_FILE["launches"]:
        hidden, config = launch["hidden"], launch["config"]
        if launch["kernel"] == "open_group":
            sites, warps = two_phase.group_config_for(hidden)
            assert config == {"SITES": sites, "num_warps": warps}
        elif launch["kernel"] == "score_group":
            tokens, chunk, warps = score_group.config_for(launch["sites"])
            sizes = {"TOKENS": tokens, "CHUNK": chunk, "num_warps": warps}
            assert config == {"SITES": score_group.padded_sites(launch["sites"])} | sizes
        elif launch["kernel"] == "mix_group":
            sites, chunk, warps = mix_group.config_for(hidden)
            assert config == {"SITES": sites, "CHUNK": chunk, "num_warps": warps}
        elif launch["kernel"] not in ("score", "weigh_group"):
            tile, warps = common.config_for(hidden)
            assert config == {"TILE": tile, "num_warps": warps}


def test_the_model_says_what_is_claimed() -> None:
    """Many tokens on eight rows, one token, and a whole model."""
    for block in ON_FILE["blocks"]:
        ratios = block["over_single_pass"]["two_phase"].values()
        if block["rows"] == 8:
            most = 0.7 if block["sites"] == 8 else 0.6
            assert all(of["8192"] <= most for of in ratios)
            assert block["hidden"] < 4096 or all(of["1"] <= 0.75 for of in ratios)
    for row in ON_FILE["shapes"]:
        if row["gpu"] == "H100":
            most = {"decode": 0.012, "prefill": 0.02}[row["phase"]]
            assert row["overhead"]["two_phase"] <= most
    for row in ON_FILE["plans"]:
        wide = row["hidden"] > backend.HIDDEN_ON_GPU
        few = row["blocks"] < backend.BLOCKS_ON_GPU
        if wide or few or row["sublayers"] < backend.SUBLAYERS_ON_GPU:
            continue
        for of in row["over_single_pass"].values():
            # 5 % faster where tokens are few or many; 4.9 % since merges reduce once, for 8192
            # tokens of d = 2048 on H200.
            assert max(of["1"], of["64"], of["8192"]) <= 0.952 and max(of.values()) <= 1.01


def test_the_anchors_on_file_are_within_what_is_said() -> None:
    assert len(ON_FILE["anchors"]) == len(anchors.ANCHORS)
    for row, anchor in zip(ON_FILE["anchors"], anchors.ANCHORS, strict=True):
        assert (row["tokens"], row["blocks"], row["measured_us"]) == anchor[1:4]
        assert row["model_us"] == pytest.approx(anchor.measured_us, rel=anchor.within)


def test_the_page_has_the_tables_on_file() -> None:
    page = (ROOT / "docs" / "measure" / "model.md").read_text()
    made = tables.of(ON_FILE)
    assert len(made) == 6
    earlier = json.loads((RESULTS / "earlier-gpu-model.json").read_text())
    made.append(tables.changes(earlier["blocks"], ON_FILE["blocks"]))
    for lines in made:
        assert "\n".join(lines) in page
    assert "Model, not measured" in page


def test_what_tensor_parallelism_costs_is_computed() -> None:
    """docs/use/scaling.md: sites are not divided, and all norms are lost."""
    (row,) = (r for r in ON_FILE["shapes"] if (r["phase"], r["gpu"]) == ("decode", "H100"))
    added, count = row["added_us"]["two_phase"], 2 * row["layers"] + 1
    page = (ROOT / "docs" / "use" / "scaling.md").read_text()
    said = re.search(rf"all {count} additions and norms.*?\((\S+) us each, (\d+) us\)", page, re.S)
    assert said is not None
    norms = int(said[2])
    assert norms == pytest.approx(count * float(said[1]), abs=count * 0.05)
    for workers in (1, 2, 4, 8):
        step = row["step_us"] / workers
        begin = f"| {workers} | {step / 1000:.2f} ms | {added:.0f} us, {100 * added / step:.1f} % |"
        lost = f" {100 * (added + norms) / step:.1f} % |" if workers > 1 else " |"
        assert begin + lost in page
