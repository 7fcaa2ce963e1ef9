"""``attnres-serve bench``: its statistics, its baseline, what it refuses, and its document."""

import fcntl
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import tqdm
from safetensors.torch import load_file
from serving import DEMO, GOLDENS, draft_of_the_demo, run_module

from attnres_serve import output
from attnres_serve.bench import (
    baseline,
    kept,
    machine,
    measure,
    process,
    session,
    text,
    workload,
)
from attnres_serve.bench import document as documents
from attnres_serve.bench.baseline import baseline_config, write_baseline
from attnres_serve.bench.engine import Bench
from attnres_serve.bench.ratios import (
    Results,
    Samples,
    geometric_mean,
    interval,
    overheads,
    paired_ratios,
    ratio_summary,
    ratio_text,
    student_quantile,
)
from attnres_serve.bench.workload import Case, make_cases
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.cli import main
from attnres_serve.compat import device
from attnres_serve.compat.device import Kind
from attnres_serve.compat.workarounds import malloc
from attnres_serve.errors import SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.resolve import resolve
from attnres_serve.start.ends import how_it_ended

PREFILL, DECODE = Case("prefill", 1, 128, 0), Case("decode", 8, 64, 18)


# Statistics.


def test_ratios_are_taken_within_a_turn():
    """Not between medians of turns, which may be of different turns."""
    assert paired_ratios([2.0, 30.0, 4.0], [1.0, 10.0, 8.0]) == [2.0, 3.0, 0.5]
    ours, base = Samples([[1.0, 20.0, 3.0]] * 2), Samples([[2.0, 10.0, 30.0]] * 2)
    assert ours.ratios(base) == [0.5, 0.5]  # of 0.5, 2 and 0.1; the medians are 3 and 10
    with pytest.raises(SettingError, match="not positive"):
        paired_ratios([1.0, -0.1], [1.0, 1.0])


def test_students_t_is_that_of_the_tables():
    found = [student_quantile(freedom) for freedom in (1, 2, 7, 30)]
    assert found == pytest.approx([12.7062, 4.3027, 2.3646, 2.0423], abs=1e-4)


def test_the_interval_over_starts_is_students():
    logs = np.log([1.01, 1.03, 1.02])
    reach = student_quantile(2) * np.std(logs, ddof=1) / np.sqrt(3)
    middle = np.log(geometric_mean([1.01, 1.03, 1.02]))
    expected = np.exp([middle - reach, middle + reach])
    assert interval([1.01, 1.03, 1.02]) == pytest.approx(expected)
    hiccups = [[1.01, 1.01, 9.0], [0.1, 1.03, 1.03], [1.02, 1.02, 1.02]]
    assert ratio_summary(hiccups)["ci95"] == pytest.approx(expected)
    assert ratio_summary([[1.01], [1.03], [1.02]])["no_interval"] is None


def test_one_start_has_no_interval():
    found = ratio_summary([[1.01, 1.03, 1.02]])
    assert found["ratio"] == pytest.approx(geometric_mean([1.01, 1.03, 1.02]))
    assert (found["ci95"], found["includes_1"]) == (None, None)
    assert "one start" in found["no_interval"] and ratio_text(found) == "1.02 (one start)"


@pytest.mark.parametrize(
    ("ratio", "reach", "starts", "expected"),
    [
        (1.0123, 0.004, 4, "1.012 (1.008 to 1.016)"),
        (1.0123, 0.012, 4, "1.01 (1.00 to 1.02)"),
        (1.0123, 0.2, 4, "1.0 (0.8 to 1.2)"),
    ],
)
def test_a_ratio_has_the_digits_that_are_to_be_believed(ratio, reach, starts, expected):
    found = {"ratio": ratio, "ci95": [ratio - reach, ratio + reach], "start_ratios": [1.0] * starts}
    assert ratio_text(found) == expected


# Work.


def test_cells_fit_the_model():
    cases = make_cases(256, None, (1, 8), 30)
    assert cases == [
        Case("prefill", 1, 128, 0),
        Case("prefill", 1, 215, 0),  # 512 would not fit
        Case("decode", 1, 128, 30),
        Case("decode", 8, 128, 30),
    ]
    assert max(case.context + case.max_tokens() for case in cases) <= 256


@pytest.mark.parametrize(("drafts", "longest"), [(0, 959), (1, 895), (3, 767)])
def test_answers_have_room_for_every_drafted_token(drafts, longest):
    cases = make_cases(1024, [longest], (1,), workload.STEPS, drafts)
    assert max(case.context + case.max_tokens(drafts) for case in cases) == 1024
    with pytest.raises(SettingError, match=f"expected 1 to {longest} here"):
        make_cases(1024, [longest + 1], (1,), workload.STEPS, drafts)


def test_prompts_of_text_begin_as_the_tokenizer_begins_them(monkeypatch):
    """As a sequence of the tokenizer's does, somewhere in a text, elsewhere in every turn."""
    monkeypatch.setattr(text, "MOST", 2**14)
    read_text = text.Text(DEMO)
    for cell in (DECODE, PREFILL):
        drawn = [prompt for turn in range(3) for prompt in read_text.draw(cell, turn)]
        assert len(drawn) == 3 * cell.batch == len(set(map(tuple, drawn)))
        assert {len(prompt) for prompt in drawn} == {cell.context}
        assert {prompt[0] for prompt in drawn} == {1}  # <s>
        assert drawn[: cell.batch] == read_text.draw(cell, 0)


# The baseline.


@pytest.mark.parametrize(
    "golden",
    [
        *("baseline_attnres", "fla_transformer_block"),
        *("qwen3_attnres_full", "qwen3_attnres_cumulative_block"),
    ],
)
def test_the_baseline_is_the_family_with_the_same_weights(golden, tmp_path):
    folder = GOLDENS / golden
    found = check_folder(folder)
    write_baseline(folder, found, tmp_path / "twin")
    config = json.loads((tmp_path / "twin" / "config.json").read_text())
    shapes = FAMILIES[found.parsed.family].shapes(config)
    own = load_file(folder / "model.safetensors")
    plain = load_file(next((tmp_path / "twin").glob("*.safetensors")))
    assert {name: tuple(tensor.shape) for name, tensor in plain.items()} == {
        name: tuple(shape)
        for name, shape in shapes.items()
        if name != "lm_head.weight" or not config.get("tie_word_embeddings")
    }
    keys = {key for key in config if "attn_res" in key or "attnres" in str(config[key])}
    assert keys == ({"attn_res", "model_type"} if golden == "baseline_attnres" else set())
    if keys:  # our class of the same attention, without sites
        parsed = resolve(config)
        assert parsed is not None and (parsed.family, parsed.spec) == (found.parsed.family, None)
    values = [tensor for tensor in own.values()]
    for tensor in plain.values():
        assert any(
            tensor.shape == other.shape and torch.equal(tensor, other) for other in values
        ), "a tensor of the baseline is none of the checkpoint's"


def test_a_baseline_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "twin").write_text("in the way")
    with pytest.raises(SettingError, match=r"^the baseline cannot be written .*XDG_CACHE_HOME\.$"):
        write_baseline(DEMO, check_folder(DEMO), tmp_path / "twin")


@pytest.mark.parametrize(
    ("golden", "on_cpu", "stock"),
    [
        ("goldens/nanogpt_block", True, None),  # stock vLLM has no such model
        ("family_goldens/kimi_linear", True, None),  # and this one for GPUs alone
        ("family_goldens/kimi_k3", True, None),
        ("family_goldens/kimi_linear", False, "KimiLinearForCausalLM"),
        ("family_goldens/kimi_k3", False, "KimiLinearForCausalLM"),
    ],
)
def test_without_stock_vllm_the_baseline_has_the_plugin(golden, on_cpu, stock, monkeypatch):
    """The same class of ours, without sites; it is what vLLM's own computes."""
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU if on_cpu else Kind.CUDA)
    parsed = check_folder(GOLDENS.parent / golden).parsed
    plain = baseline_config(parsed)
    if stock:
        assert plain["architectures"] == [stock] and "attn_res" not in plain
    else:
        assert plain["model_type"].startswith("attnres_") and plain["attn_res"] is None
        plain = resolve(plain, names=tuple)
        assert (plain.family, plain.spec) == (parsed.family, None)


# The engines.


def test_the_baseline_has_no_plugin_and_the_engines_equal_threads(tmp_path, monkeypatch):
    monkeypatch.delenv("GOMP_CPU_AFFINITY", raising=False)
    stock, ours = process.plain("a", DEMO, ()), process.attnres("b", DEMO, (), {})
    plain, with_sites = (process.environment(it, tmp_path) for it in (stock, ours))
    assert plain.pop("VLLM_PLUGINS") == ""
    assert with_sites.pop("VLLM_PLUGINS") == "attnres"
    assert plain == with_sites
    assert malloc.keep_freed().items() <= plain.items()
    cores = len(os.sched_getaffinity(0))
    assert plain["OMP_NUM_THREADS"] == str(cores) == str(len(plain["GOMP_CPU_AFFINITY"].split()))
    parallel = process.plain("a", DEMO, ("--tensor-parallel-size=2",))
    assert "GOMP_CPU_AFFINITY" not in process.environment(parallel, tmp_path)


TELLS = """
from attnres_serve.start import failures
with failures.reported():
    raise ValueError("no\\nroom")
"""
WRITES = "import sys; sys.stderr.write({!r})"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (WRITES.format("no error\nThe system says no.\n"), "it wrote: The system says no); "),
        (WRITES.format("ValueError:" + "x" * 400), f"it wrote: ValueError:{'x' * 289}); "),
        ("", "ended (it ended with status 0); "),
        ("import os; os.kill(os.getpid(), 9)", f"ended (it {how_it_ended(-9)}); "),
        (TELLS, "ended (ValueError: no room); "),
    ],
    ids=["last-line", "long", "silent", "killed", "told"],
)
def test_an_engine_that_ends_says_why(script, told, tmp_path, monkeypatch):
    """The sentence has the reason; the log is kept where it says."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "script.py").write_text(script)
    spec = process.EngineSpec("attnres", (), script=tmp_path / "script.py")
    with (
        pytest.raises(SettingError, match=re.escape(told)) as caught,
        output.libraries_hidden("bench"),
        process.running(spec, tmp_path) as engine,
    ):
        engine.wait()
    kept = Path(re.findall(r"its log is (\S+)\.$", str(caught.value))[0])
    assert [*tmp_path.glob("*.log")] == [kept]


def test_an_interruption_ends_an_engine_at_once(tmp_path):
    """Not when it next looks for a request, which during a start is after it."""
    (tmp_path / "script.py").write_text("import time; print([1], flush=True); time.sleep(600)")
    spec = process.EngineSpec("attnres", (), script=tmp_path / "script.py")
    with suppress(KeyboardInterrupt), process.running(spec, tmp_path) as engine:
        engine.wait()
        raise KeyboardInterrupt
    assert engine.process.returncode == -signal.SIGTERM


# What is refused.


def facts(**changes: Any) -> dict[str, Any]:
    none = {"eager": 3, "compiled": 0}
    executed = {"single_pass": {"eager": 0, "compiled": 9}, "two_phase": none}
    alike = {"dtype": "bfloat16", "code_loaded": True}
    same = {"vocabulary": 50, "compiled": True, "plugin_loaded": True, "alike": alike}
    same |= {"drafted": {}, "saved_s": 0.0}
    return same | {"executed": executed} | changes


def engine(name: str, algorithm: str | None, at_start: dict[str, Any]) -> process.Engine:
    return process.Engine(
        process.EngineSpec(name, (), algorithm, algorithm is not None), None, Path(), at_start
    )


def test_settings_that_drafts_change_may_differ():
    base, other = (engine(name, "auto", facts()) for name in ("baseline", "drafts"))
    base.at_start["alike"] = {"async_scheduling": True, "dtype": "bfloat16"}
    other.at_start["alike"] = base.at_start["alike"] | {"async_scheduling": False}
    with pytest.raises(SettingError, match="async_scheduling is False in the engine of drafts"):
        measure.check_alike([base, other])
    other.spec = replace(other.spec, drafts=2)
    measure.check_alike([base, other])
    other.at_start["alike"]["dtype"] = "float32"
    with pytest.raises(SettingError, match="dtype is float32 in the engine of drafts"):
        measure.check_alike([base, other])


AFTER = {"single_pass": {"eager": 0, "compiled": 20}, "two_phase": {"eager": 3, "compiled": 0}}
EAGER = {"single_pass": {"eager": 9, "compiled": 9}, "two_phase": {"eager": 3, "compiled": 0}}
OTHER = {"single_pass": {"eager": 0, "compiled": 9}, "two_phase": {"eager": 3, "compiled": 5}}


@pytest.mark.parametrize(
    ("algorithm", "after"),
    [
        ("single_pass", {"executed": OTHER}),
        ("single_pass", {"executed": EAGER}),
        ("single_pass", {}),
        ("auto", {"executed": AFTER, "algorithm": "two_phase"}),
        ("single_pass", {"executed": AFTER, "plugin_loaded": False}),
        (None, {"executed": AFTER}),
    ],
    ids=["other", "eager", "no-site", "not-as-told", "without-plugin", "plugin-in-baseline"],
)
def test_an_engine_that_ran_something_else_is_refused(algorithm, after):
    with pytest.raises(SettingError, match=r"ran .* expected .*: its figures would be another's"):
        measure.check_ran(engine("attnres", algorithm, facts()), facts(**after))


def test_an_engine_that_changed_meanwhile_is_refused():
    """As one does of which a library takes threads."""
    begun, ended = (facts(alike={"dtype": "bfloat16", "threads": count}) for count in (2, 1))
    measure.check_ran(engine("drafts", "single_pass", begun), begun | {"executed": AFTER})
    with pytest.raises(SettingError, match=r"^threads is 1 in the engine of drafts at the end and"):
        measure.check_ran(engine("drafts", "single_pass", begun), ended | {"executed": AFTER})


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere/at/all"], "nowhere/at/all does not exist"),
        (["--quick", str(DEMO)], "bench needs a checkpoint as its first argument"),
        ([str(DEMO), "--model", "demo"], "--model goes with --http"),
        ([str(DEMO), "--revision", "main"], "--revision is not looked up here"),
        ([str(DEMO), "--prompt-lengths", "1024"], "--prompt-lengths has 1024; expected 1 to 959"),
        ([str(DEMO), "--batches", "0"], "--batches has 0; expected 1 to 4096"),
        ([str(DEMO), "--starts", "0"], "--starts is 0; expected at least 1."),
        ([str(DEMO), "--budget", "-1"], "--budget is -1; expected a number of minutes above 0."),
        ([str(DEMO), "--additional-config", "{}"], "--additional-config would be ours in one"),
        (
            [str(DEMO), "--speculative_config.method=ngram"],
            "expected one JSON object that has num_",
        ),
        ([str(DEMO), "-sc", "{}"], "--speculative-config is read as {}; expected one JSON object"),
        ([str(DEMO), "--spec-tokens", "3"], "--spec-tokens is a part of --speculative-config"),
        ([str(DEMO), "--enable-prefix-caching"], "--enable-prefix-caching would save what is"),
        ([str(DEMO), "--enforce_eager", "--quick"], "AttnRes would seem faster than no AttnRes"),
        ([str(DEMO), "--max_model_len=30"], "have room for 30 tokens together; expected at least"),
        ([str(DEMO), "--max-model-len", "999999"], "has a context of 1024 tokens; give at most"),
        ([str(DEMO), "--max-modle-len", "9"], "found --max-modle-len, which is no flag; did you"),
        ([str(DEMO), "--http", "127.0.0.1:8000"], "server answers at 127.0.0.1:8000 (unknown url"),
        ([str(DEMO), "--http", "http:///v1"], "(no host given); expected the address of one, for"),
        ([str(DEMO), "--http", "http://x", "--budget", "2"], "--budget does not go with --http"),
    ],
)
def test_a_refusal_is_one_sentence(words, sentence, capsys):
    assert main(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("attnres-serve: ") and sentence in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (
            "dtype: half\nattnres_backend: gpu",
            "line 2: found --attnres-backend gpu; expected one of",
        ),
        ("port: 1", "line 1: found --port, which is no flag"),
        ("max_model_len: 4x", "line 1: found --max-model-len 4x; expected a whole number such as"),
        ("enable-prefix-caching: true", "--enable-prefix-caching would save what is timed"),
    ],
)
def test_a_file_of_flags_is_refused(lines, sentence, capsys, tmp_path):
    (file := tmp_path / "bench.yaml").write_text(lines)
    assert main(["bench", str(DEMO), "--config", str(file)]) == 2
    assert sentence in capsys.readouterr().err


def test_engines_have_the_flags_of_a_file(monkeypatch, tmp_path):
    """Those of vLLM as words, and ours; a switch is off whatever its name is written like."""
    made = []
    monkeypatch.setattr(process, "plain", lambda *given, **_: made.append(given[2]))
    monkeypatch.setattr(process, "attnres", lambda *given: made.append(given[2:4]))
    monkeypatch.setattr(session, "run", lambda *_: pytest.fail("ended", pytrace=False))
    (file := tmp_path / "bench.yaml").write_text(
        "max-model-len: 900\nattnres-backend: torch\nenable_chunked_prefill: false\n"
    )
    with pytest.raises(pytest.fail.Exception, match="ended"):
        main(["bench", str(DEMO), "--config", str(file), "--attnres-algorithm", "two_phase"])
    flags = ["--max-model-len=900", "--no-enable-chunked-prefill"]
    ours = {"attnres_algorithm": "two_phase", "attnres_backend": "torch"}
    assert made == [flags, (flags, ours)]


# What an engine would end at, by what words and with vLLM's attention of what head size.
EARLY = {
    "is triton, which was shown on CUDA alone": (
        ["--attnres-backend", "triton"],
        64,
    ),
    "Connection refused); expected the address of": (["--http", "http://127.0.0.1:9"], 64),
    "has heads of the size 64, and vLLM's attention on CPU computes those of 7": ([], 7),
    "found no 'g++' on the path": ([], 64),
}
SCRIPT = """
import json, sys
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.cli import main
from attnres_serve.compat import device, source
device.kind = lambda: device.Kind.CPU
for words, size in json.loads(sys.argv[1]):
    source.head_sizes = lambda: [size]
    print(main(["bench", *words]), {"torch", "vllm"} & set(sys.modules))
"""


def test_refusals_come_before_torch_is_imported(tmp_path):
    asked = json.dumps([([str(DEMO), *words], size) for words, size in EARLY.values()])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, asked],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == len(EARLY) * "2 set()\n", done.stderr
    for said, sentence in zip(done.stderr.splitlines(), EARLY, strict=True):
        assert sentence in said


# The turns of a measurement.


class Asked(process.Engine):
    """An engine that answers at once, a prefill's first token after the seconds it is given.

    Attributes:
        said: what engines were asked to begin or to go on with, which is None.
        step: seconds of a step of decode.
    """

    def __init__(self, name: str, said: list, seconds: list[float]) -> None:
        super().__init__(process.EngineSpec(name, ()), None, Path(), facts())
        self.said, self.seconds, self.step = said, itertools.cycle(seconds), 0.5
        self.left = 0

    def ask(self, what: str, **asked: Any) -> Any:
        if what == "facts":
            return facts(executed={}, plugin_loaded=False, alike=self.at_start["alike"])
        if asked.get("max_tokens") == workload.WARM_TOKENS:
            return None
        if what == "drop":
            return self.drop()
        self.said.append((self.name, asked.get("prompts")))
        return getattr(self, what)(**asked)

    def begin(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        assert not self.left, "steps of the last prompts are left"
        self.batch, self.left = len(prompts), max_tokens - 1
        return {"first": [next(self.seconds)]}

    def decode(self, most: int) -> dict[str, Any]:
        self.left -= most
        assert self.left >= 0, "more steps than tokens"
        return {"steps": [self.step] * most, "tokens": [[1] * self.batch] * most}


def test_engines_take_turns_and_a_round_of_prefill_is_a_median():
    said: list = []
    engines = [Asked(name, said, seconds) for name, seconds in (("a", [1, 9, 2, 9, 9]), ("b", [3]))]
    found = rounds_of(engines, PREFILL, 6)
    assert found[PREFILL]["a"].rounds == [9.0] * 6 and found[PREFILL]["b"].rounds == [3.0] * 6
    assert len(found[PREFILL]["a"].times) == 6 * PREFILL.turns
    pairs = list(zip(said[::2], said[1::2], strict=True))
    assert len(pairs) == 6 * PREFILL.turns + measure.DISCARDED
    assert all(one[1] == other[1] and one[0] != other[0] for one, other in pairs)
    assert [one[0] for one, _ in pairs[:4]] == ["a", "b", "b", "a"]
    assert len({str(one[1]) for one, _ in pairs}) == len(pairs), "a prompt came twice"


def rounds_of(engines: list[Asked], cell: Case, rounds: int, start: int = 0) -> Results:
    """What some rounds of a start found."""
    plan = measure.Rounds(measure.DISCARDED, rounds)
    return measure.measure(engines, [cell], plan, start, lambda: None)


def running(
    monkeypatch: pytest.MonkeyPatch, note: Any = None, seconds: dict[str, Any] | None = None
) -> list:
    """Have ``session.run`` start engines that are asked at once.

    Args:
        seconds: of a prefill, by engine, start after start; by default always 1 of two engines.
        note: called with the engine's name and folder where it starts, and with None at its end;
            it may give other facts of the start.

    Returns:
        The specs of the engines, and the requests.
    """
    said: list = []
    seconds = seconds or {name: itertools.repeat(1.0) for name in ("baseline", "other")}

    @contextmanager
    def start(spec: process.EngineSpec, folder: Path):
        changes = note(spec.name, folder) if note else None
        engine = Asked(spec.name, said, [next(seconds[spec.name])])
        engine.at_start |= changes or {}
        yield engine
        if note:
            note(None, None)

    monkeypatch.setattr(session, "running", start)
    return [[process.EngineSpec(name, ()) for name in seconds], said]


def compiling(clock: list[float], first_s: float, later_s: float) -> Any:
    """A ``note`` of ``running``: both engines compile at the first start, and load code later.

    Args:
        clock: seconds that have passed, to which every start of an engine adds.
        first_s, later_s: what such a start of one engine takes.
    """

    def note(name: str | None, _: Any) -> dict[str, Any] | None:
        if name is None:
            return None
        compiles = clock[0] < 2 * first_s
        clock[0] += first_s if compiles else later_s
        return {
            "alike": facts()["alike"] | {"code_loaded": not compiles},
            # Both compile at once, so that a start saves what the shorter one took.
            "saved_s": compiles * (2 * (first_s - later_s) + (name == "baseline")),
        }

    return note


@pytest.mark.parametrize("rounds", [1, 2])
def test_every_start_has_new_engines_started_in_another_order(monkeypatch, rounds):
    started: list = []
    seconds = {"baseline": itertools.repeat(1.0), "other": itertools.repeat(2.0)}
    specs, said = running(monkeypatch, lambda *event: started.append(event), seconds)
    found = session.run(specs, [PREFILL], 4, rounds)
    names = [name for name, _ in started]
    assert [name and name[0] for name in names] == [
        *"bo", None, None, *"ob", None, None, *"ob", None, None, *"bo", None, None
    ]  # fmt: skip
    folders = {event for event in started if event[0]}
    assert len(folders) == 2, "compiled code is not kept"
    assert [start[PREFILL]["other"].rounds for start in found.results] == 4 * [rounds * [2.0]]
    assert list(found.engines) == ["baseline", "other"]
    turns = 4 * (rounds * PREFILL.turns + measure.DISCARDED)
    assert len({str(prompts) for _, prompts in said}) == turns, "a prompt came twice"


@pytest.mark.parametrize(
    ("budget", "starts"), [(inf, 4), (1, 1), (71, 1), (73, 2), (91, 2), (93, 3), (113, 4)]
)
def test_no_start_but_the_first_overruns_the_budget(budget, starts, monkeypatch):
    """The first takes 50 seconds, because it compiles, and any other 20; a tenth is left."""
    clock = [0.0]
    specs, _ = running(monkeypatch, compiling(clock, 25.0, 10.0))
    monkeypatch.setattr(session.time, "monotonic", lambda: clock[0])
    found = session.run(specs, [PREFILL], 4, 2, budget=budget)
    assert len(found.results) == starts
    assert found.took_s == 50 + 20 * (starts - 1)


@pytest.mark.parametrize(
    ("budget", "rounds", "starts"),
    [
        (inf, (2, 4), 4),
        (1600, (2, 4), 3),
        (1000, (2, 2), 3),  # 75 of the first, twice 30, six rounds of 30 and of 90, and a tenth
        (900, (2, 1), 4),
        (100, (2, 1), 1),
    ],
)
def test_rounds_are_cut_before_starts(budget, rounds, starts, monkeypatch):
    """A start takes 75 seconds, as it compiles, and later ones 30; a round takes 90, or 30.

    The very first round takes three times as long, which is not counted on.
    """
    clock, ask, cases = [0.0], Asked.ask, [PREFILL, DECODE]

    def slow(self: Asked, what: str, **more: Any) -> Any:
        seconds = {"begin": 2.5, "decode": 5.0}.get(what, 0.0)  # an engine begins twice a turn
        clock[0] += seconds if len(said) >= 6 else 3 * seconds
        return ask(self, what, **more)

    specs, said = running(monkeypatch, compiling(clock, 37.5, 15.0))
    monkeypatch.setattr(Asked, "ask", slow)
    monkeypatch.setattr(session.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(output, "say", lambda _: None)
    found = session.run(specs, cases, 4, 4, budget=budget)
    assert (found.rounds, len(found.results)) == (rounds, starts)
    assert [len(start[PREFILL]["other"].rounds) for start in found.results] == [rounds[1]] * starts
    assert found.evidence_s == (None if starts > 1 else pytest.approx(1.1 * (135 + 6 * 30 + 270)))
    assert found.took_s <= budget or starts == 1
    prompts = {str(one) for _, one in said if one}
    turns = [rounds[0] + rounds[1] * case.turns for case in cases]
    assert len(prompts) == starts * sum(turns), "a prompt came twice"


@pytest.mark.parametrize(
    ("loaded", "disabled", "workers", "saved"),
    [(0, False, 1, 7.0), (1, False, 1, 0.0), (0, True, 1, 0.0), (0, False, 2, 0.0)],
    ids=["compiled", "loaded", "without-cache", "workers"],
)
def test_what_a_later_start_does_not_compile(loaded, disabled, workers, saved, monkeypatch):
    """Workers of stock vLLM on CPU cannot load compiled code."""
    from vllm import envs
    from vllm.compilation.counter import compilation_counter

    monkeypatch.setattr(compilation_counter, "num_aot_artifacts_loaded", loaded)
    monkeypatch.setattr(envs, "VLLM_DISABLE_COMPILE_CACHE", disabled, raising=False)
    bench = object.__new__(Bench)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=workers),
        compilation_config=SimpleNamespace(compilation_time=7.0),
    )
    bench.engine = SimpleNamespace(vllm_config=config)
    assert bench._saved_s() == saved


def test_engines_restart_if_only_some_load_compiled_code(monkeypatch, tmp_path):
    started = []

    def tick(name: str | None, folder: Path) -> dict[str, Any]:
        assert folder in (None, tmp_path)
        started.append(name)
        loads = name == "baseline" or "other" in started[:-1]
        return {"alike": facts()["alike"] | {"code_loaded": loads}}

    specs, _ = running(monkeypatch, tick)
    found = session.run(specs, [PREFILL], 1, 1, caches=tmp_path)
    assert started == ["baseline", "other", None, None] * 2
    assert len(found.results) == 1


def test_compiled_code_stays_and_the_baseline_does_not(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, other = tmp_path / "model", tmp_path / "other"
    with kept.caches(model) as (folder, plain):
        (folder / "code").touch()
        assert not plain.exists()
        plain.mkdir()
        (plain / "weights").touch()
        with kept.caches(other) as (second, _):
            assert second != folder
    with kept.caches(model) as found:
        assert found == (folder, plain)
        assert (folder / "code").exists()
        assert not plain.exists()


def test_a_run_waits_for_another_on_its_checkpoint(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with (
        kept.caches(tmp_path) as (folder, _),
        (folder / "lock").open() as lock,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_is_waited_for_is_said(monkeypatch, tmp_path, capsys):
    """Once the other run has ended, this one goes on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with kept.caches(tmp_path) as (folder, _):
        pass
    assert not capsys.readouterr().err
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(kept.output, "say", lambda said: (lock.close(), print(said)))
        with kept.caches(tmp_path):
            assert "another bench of this checkpoint" in capsys.readouterr().out


def test_there_is_no_place_for_compiled_code(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with (
        pytest.raises(SettingError, match=r"^bench has no place .*set XDG_CACHE_HOME to a folder"),
        kept.caches(tmp_path),
    ):
        pass


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_terminal_shows_narrowing_ratios(stream, monkeypatch):
    """In 80 columns, and anything else sees a line for whatever begins."""
    seen = stream()
    monkeypatch.setattr(output, "err", lambda: seen)
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: (80, 40))
    seconds = {"baseline": itertools.repeat(1.0), "attnres": itertools.cycle([1.01, 1.03])}
    specs, _ = running(monkeypatch, seconds=seconds)
    session.run(specs, [PREFILL, DECODE], 4, 2)
    said = seen.getvalue()
    if stream is io.StringIO:
        lines = [line.partition(" s  ")[2] for line in said.splitlines()]
        assert lines[:3] == ["start 1/4, baseline", "start 1/4, attnres", "start 1/4, 2 rounds"]
        assert len(lines) == 12
        return
    shown = [line.rstrip() for line in re.split(r"[\r\n]", said)]
    assert max(map(len, shown)) <= 80
    assert "start 1/4 |" in said
    assert "TTFT 1.01 (one start), TPOT 1.00 (one start)" in said
    assert "TTFT 1.02 (1.00 to 1.04), TPOT 1.000 (1.000 to 1.000)" in said  # of four


@pytest.mark.parametrize(
    ("number", "cell", "rounds"),
    [
        *((2, cell, rounds) for cell in (PREFILL, DECODE) for rounds in (1, 2, 3, 4)),
        (3, DECODE, workload.ROUNDS),
    ],
    ids=str,
)
def test_engines_come_first_equally_often(number, cell, rounds):
    """Over the usual starts; three engines by a turn, of whose orders a start has half."""
    asked: dict[str, list[str]] = {"begin": [], "decode": []}
    for start in range(workload.STARTS):
        said: list = []
        engines = [Asked(name, said, [1.0]) for name in "abc"[:number]]
        rounds_of(engines, cell, rounds, start)
        for what in asked:
            found = [name for name, prompts in said if (prompts is None) == (what == "decode")]
            asked[what] += found[measure.DISCARDED * number :]
    for what, names in asked.items():
        before: Counter[str] = Counter()
        turns = [names[at : at + number] for at in range(0, len(names), number)]
        for turn in turns:
            before.update(
                "".join(sorted(pair)) + pair[0] for pair in itertools.combinations(turn, 2)
            )
        off = [abs(count - len(turns) / 2) for count in before.values()]
        assert max(off, default=0) <= number - 2, (what, before)


class Drafting(Asked):
    """An engine whose steps take longer, and give one of two sequences three tokens, one four."""

    def __init__(self, name: str, drafts: int) -> None:
        super().__init__(name, [], [1.0])
        self.spec = process.EngineSpec(name, (), drafts=drafts)
        self.dropped = 0

    def decode(self, most: int) -> dict[str, Any]:
        self.left -= 3 * most  # of the fourth token
        answer = super().decode(most)
        return answer | {"steps": [0.875] * most, "tokens": [[3, 4]] * most}

    def drop(self) -> None:
        self.dropped, self.left = self.dropped + 1, 0


def test_with_drafts_a_step_counts_by_its_tokens():
    """Prompts are those that are given, and what is left of an answer is not waited for."""
    base, drafting = Asked("a", [], [1.0]), Drafting("b", drafts=3)
    cell, drawn = replace(DECODE, batch=2), []

    def draw(asked: Case, turn: int) -> list[list[int]]:
        drawn.append([[turn, number] for number in range(asked.batch)])
        return drawn[-1]

    plan = measure.Rounds(measure.DISCARDED, 1)
    found = measure.measure([base, drafting], [cell], plan, 0, lambda: None, draw)
    assert found[cell]["b"].turns == [[0.25] * len(cell.slices)]  # 0.875 / 3.5
    assert found[cell]["b"].ratios(found[cell]["a"]) == [0.5]
    assert found[cell]["b"].times == [0.875] * cell.steps
    assert drafting.dropped == 1 + measure.DISCARDED and drawn
    assert all(prompts in drawn for _, prompts in base.said if prompts)


class Staggered(Asked):
    """An engine whose prompts begin one after the other, and end so."""

    few = 3

    def decode(self, most: int) -> dict[str, Any]:
        answer = super().decode(most)
        alone = min(most, max(0, self.few - self.left))
        if alone:
            answer["steps"][-alone:] = [50.0] * alone
            answer["tokens"][-alone:] = [[1]] * alone
        answer["steps"][: workload.UNTIMED] = [100.0] * workload.UNTIMED
        return answer


def test_only_steps_of_the_whole_batch_count():
    engines = [Staggered(name, [], [1.0]) for name in "ab"]
    found = rounds_of(engines, DECODE, 2)[DECODE]
    for samples in found.values():
        assert samples.turns == [[0.5] * len(DECODE.slices)] * 2
        assert samples.times == [0.5] * 2 * (DECODE.steps - Staggered.few)
    engines[0].few = DECODE.slices[-1] + workload.UNTIMED  # a whole slice, of one engine alone
    found = rounds_of(engines, DECODE, 2)[DECODE]
    for samples in found.values():
        assert samples.turns == [[0.5] * (len(DECODE.slices) - 1)] * 2
    engines[0].few = 2 * DECODE.max_tokens()
    with pytest.raises(SettingError, match=r"fewer than half of the steps \(8 at most\)"):
        rounds_of(engines, DECODE, 1)


class Crowded:
    """An engine of vLLM's with room for one prompt: the others wait until that one has ended."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}

    def add_request(self, number: str, request: dict, params: Any) -> None:
        self.left[number] = params.max_tokens

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        number = next(iter(self.left))
        self.left[number] -= 1
        if not self.left[number]:
            del self.left[number]
        return [SimpleNamespace(request_id=number, outputs=[SimpleNamespace(token_ids=[1])])]


def test_prompts_that_waited_end_before_the_next_begin():
    bench = object.__new__(Bench)
    bench.engine, bench.number = Crowded(), 0
    bench.begin([[1], [2]], 3)
    assert bench.decode(most=1) == {"steps": [pytest.approx(0, abs=1)], "tokens": [[1]]}
    assert bench.engine.left
    assert len(bench.begin([[3]], 2)["first"]) == 1
    assert list(bench.engine.left) == ["3"] and bench.decode()["tokens"] == [[1]]


# The document.


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch, capsys) -> Callable[..., dict[str, Any]]:
    """Makes the document of a run with a start for every ratio, by which AttnRes takes longer."""

    def make(
        *ratios: float,
        starts: int | None = None,
        drafts: dict | None = None,
        needs: float | None = None,
        **changes: Any,
    ) -> dict[str, Any]:
        plan = measure.Rounds(measure.DISCARDED, 9)
        results: list[Results] = []
        for ratio in ratios:
            each = {
                name: Samples(
                    [[scale * time] * 3 for time in TIMES], [scale * time for time in TIMES]
                )
                for name, scale in (("baseline", 1.0), ("drafts" if drafts else "attnres", ratio))
            }
            results.append({PREFILL: each, DECODE: each})
        engine = facts(executed={}, gpu=None, architecture="A", dtype="bfloat16") | changes
        engine |= {"backend": "cpp", "algorithm": "single_pass"}
        found = session.Outcome(
            [dict.fromkeys(each, engine)] * len(ratios), results, 60.0, plan, needs
        )

        def run(specs: list[process.EngineSpec], *_: Any) -> session.Outcome:
            assert {spec.name for spec in specs} == each.keys()
            make.specs = specs
            return found

        monkeypatch.setattr(session, "run", run)
        monkeypatch.setattr(baseline, "write_baseline", lambda *_: None)
        words = [f"--starts={starts or len(ratios)}"]
        words += [f"--speculative-config={json.dumps(drafts)}"] if drafts else []
        assert main(["bench", str(DEMO), *words]) == 0
        make.shown, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
        return json.loads(last)

    return make


TIMES = [0.01 * (1 + number) for number in range(9)]


def test_the_figures_follow_from_the_rounds(document):
    made = document(1.02, 1.03, 1.04)
    for row in made["cells"]:
        base, ours = row["engines"]["baseline"], row["engines"]["attnres"]
        starts = [base["rounds_s"][start : start + 9] for start in (0, 9, 18)]
        assert base["median_s"] == pytest.approx(geometric_mean(list(map(median, starts))))
        ratios = ours["round_ratios"]
        assert ratios == pytest.approx(paired_ratios(ours["rounds_s"], base["rounds_s"]))
        each = [median(ratios[start : start + 9]) for start in (0, 9, 18)]
        assert ours["start_ratios"] == each == pytest.approx([1.02, 1.03, 1.04])
        assert ours["ratio"] == pytest.approx(geometric_mean(each))
        assert ours["ci95"] == pytest.approx(interval(each))
        tokens = row["context"] if row["phase"] == "prefill" else row["batch"]
        assert base["tokens_per_s"] == pytest.approx(tokens / base["median_s"])
        assert made["overhead"][row["phase"]]["ci95"] == pytest.approx(interval(each))
    prefill, decode = (row["engines"]["baseline"] for row in made["cells"])
    assert decode["itl_s"]["p50"] == prefill["ttft_s"]["p50"] == pytest.approx(0.05)
    assert prefill["itl_s"] is decode["ttft_s"] is None
    assert document(1.0, 1.0)["overhead"]["decode"]["includes_1"]
    alone = document(1.0)["overhead"]["decode"]
    assert alone["ci95"] is None and alone["no_interval"]


def test_the_mean_over_cells_is_taken_within_a_round():
    """Noise that is common to the cases of a start stays in the interval."""
    starts = []
    for first, second, base in ((2.0, 1.0, 1.0), (8.0, 1.0, 2.0)):
        one, other, plain = (Samples([[time]]) for time in (first, second, base))
        starts.append(
            {
                DECODE: {"attnres": one, "baseline": plain},
                replace(DECODE, batch=1): {"attnres": other, "baseline": plain},
            }
        )
    found = overheads(starts, "attnres", "baseline")["decode"]
    assert found["ci95"] == pytest.approx(interval([2**0.5, 2**0.5]))


@pytest.mark.parametrize(
    ("ratios", "told"),
    [
        ([1.021], "1.02 (one start)"),
        ([1.02, 1.03], "1.02 (0.96 to 1.09)"),
        ([1.021] * 3 + [1.022], "1.021 (1.020 to 1.022)"),
    ],
)
def test_a_report_has_80_columns_and_begins_with_the_ratio(ratios, told, document):
    document(*ratios)
    shown = document.shown
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    included = "; 1 is in the interval" * ("0.96" in told)
    assert lines[:2] == [
        f"{told:26}TTFT in prefill{included}",
        f"{told:26}TPOT in decode{included}",
    ]
    assert f"{told:26}decode, batch 8, context 64" in lines
    assert ("p99" in shown, "A rough estimate" in shown) == (len(ratios) > 1, len(ratios) == 1)
    assert "house on llama, 8 layers of 192, 4 blocks" in shown and "eager" not in shown


DRAFTS = {"method": "draft_model", "model": "/home/x/draft", "num_speculative_tokens": 2}


def test_the_same_engine_is_measured_with_drafts_and_without(document, monkeypatch, tmp_path):
    drafts = DRAFTS | {"model": str(draft_of_the_demo(tmp_path / "draft"))}
    monkeypatch.setattr(text, "MOST", 2**14)
    counted = {"drafts": 100, "draft_tokens": 200, "accepted_tokens": 90}
    made = document(
        0.8, 0.82, drafts=drafts, drafted=counted | {"accepted_tokens_per_pos": [60, 30]}
    )
    without, drafting = document.specs
    assert {*without.flags} ^ {*drafting.flags} == {"--speculative-config=None"}
    assert without.flags[-1] in {*without.flags} - {*drafting.flags}, "an earlier flag counts less"
    assert process.UNCOUNTED not in without.flags
    assert (without.drafts, drafting.drafts, drafting.algorithm) == (0, 2, without.algorithm)
    assert made["drafts"] == {
        "drafts": 200,
        "proposed": 400,
        "accepted": 180,
        "acceptance": 0.45,
        "by_position": [0.6, 0.3],
    }
    assert str(tmp_path) not in json.dumps(made), "a path of this machine"
    shown = document.shown
    assert "With drafts to without, with the 95 % interval over 2 starts." in shown
    assert "45 % of 400 proposed tokens were accepted: 60, 30 % by place in a draft." in shown
    assert "baseline  the same engine without drafts" in shown
    assert max(map(len, shown.splitlines())) <= 80
    none = dict.fromkeys(counted, 0) | {"accepted_tokens_per_pos": [0, 0]}
    assert document(1.1, drafts=drafts, drafted=none)["drafts"]["acceptance"] == 0


def test_a_report_explains_budgets_and_eager_engines(document):
    for changes in ({}, {"starts": 4}, {"compiled": False}):
        document(1.02, 1.03, **changes)
        assert ("a larger --budget" in document.shown) == ("starts" in changes)
        assert ("engines are eager" in document.shown) == ("compiled" in changes)
    made = document(1.02, starts=4, needs=700.0)
    assert made["evidence_s"] == 700 and "--budget 12 has it here" in document.shown


def test_a_document_names_no_path_and_no_secret():
    words = ["--hf-token", "abc", "--hf_token=abc", "--header", "A=b", "C=d", "--model=/home/x/m"]
    assert machine.shown([*words, "/home/x", "8"]) == [
        "--hf-token", "***", "--hf_token=***", "--header", "***", "***", "--model=m", "x", "8"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "terminal", "has_table", "has_json"),
    [([], True, True, False), ([], False, True, True), (["--json"], True, False, True)],
)
def test_json_is_printed_on_request(
    words: list, terminal: bool, has_table: bool, has_json: bool, document, monkeypatch, capsys
) -> None:
    document(1.02)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert main(["bench", str(DEMO), "--starts=1", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1.02 (one start)") == has_table
    assert out.splitlines()[-1].startswith("{") == has_json


# The whole.


@pytest.mark.engine
@pytest.mark.exhaustive
def test_a_golden_is_measured_against_its_baseline():
    """In two starts: all engines load what the first one compiled, or they are not alike."""
    words = ("--quick", "--starts", "2", "--prompt-lengths", "16", "--batches", "2")
    words += ("--attnres-algorithm", "two_phase")
    golden = str(GOLDENS / "fla_transformer_block")
    said = run_module("attnres_serve", "bench", golden, *words, timeout=1200)
    found = json.loads(said.splitlines()[-1])
    documents.Document.model_validate(found)
    texts = [word for word in json.dumps(found).replace('"', " ").split() if len(word) > 1]
    assert not [word for word in texts if word.startswith("/")], "a path of this machine"
    engines = found["engines"]
    assert not engines["baseline"]["architecture"].startswith("AttnRes")
    assert engines["attnres"]["architecture"].startswith("AttnRes")
    ran = {name for name, ways in engines["attnres"]["executed"].items() if ways["compiled"]}
    assert ran == {"two_phase"}


@pytest.mark.engine
@pytest.mark.exhaustive
def test_the_demo_is_measured_with_drafts_and_without(tmp_path):
    drafts = DRAFTS | {"model": str(draft_of_the_demo(tmp_path / "draft"))}
    words = ("--quick", "--prompt-lengths", "16", "--batches", "2", "1")
    words += ("--speculative-config", json.dumps(drafts))
    said = run_module("attnres_serve", "bench", str(DEMO), *words, timeout=1200)
    found = documents.Document.model_validate_json(said.splitlines()[-1])
    assert str(tmp_path) not in said.splitlines()[-1]
    assert found.drafts and 0 < found.drafts.accepted < found.drafts.proposed
    assert found.drafts.by_position[0] > found.drafts.by_position[1] > 0
    assert {*found.engines} == {"baseline", "drafts"}
    for engine in found.engines.values():
        assert engine.architecture.startswith("AttnRes")
