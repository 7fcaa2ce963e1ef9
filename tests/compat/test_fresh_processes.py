"""What a process finds that has imported vLLM: whose classes, and what is not loaded."""

import json
from importlib.util import find_spec
from typing import Any

import fresh
import pytest
from checkpoints import GOLDENS, write_fla

pytest.importorskip("vllm")

from attnres_serve.compat import device

RESOLVE = """
from vllm.transformers_utils.config import get_config
def answers():
    for trust in (True, False):
        try:
            config = get_config(sys.argv[1], trust_remote_code=trust)
            yield [type(config).__name__, config.to_dict()]
        except Exception as error:
            yield [type(error).__name__, str(error)]
without = [*answers()]
from attnres_serve.plugin import register
register()
answer = [without, [*answers()]]
"""
FOREIGN = """
from transformers import PreTrainedConfig


class FooConfig(PreTrainedConfig):
    model_type = "transformer"
"""
FLA = "import fla.models"
REGISTER = "from attnres_serve.plugin import register; register()"
BESIDE_FLA = f"""
from transformers import AutoConfig
from fla.models import TransformerConfig
from vllm.transformers_utils.config import get_config
folder = {str(GOLDENS / "fla_transformer_block")!r}
config = AutoConfig.from_pretrained(folder)
answer = [
    type(config) is TransformerConfig,
    config.attnres_block_size,
    type(get_config(folder, trust_remote_code=False)).__name__,
    type(AutoConfig.from_pretrained(folder)) is TransformerConfig,
]
"""
KIMI = """
from attnres_serve.model import kimi
answer = sorted(sys.modules)
"""
# A thread that is bound to one core, as the first of a worker is, finds drafts of n-grams.
NUMBA = """
import numpy, torch
answer = [torch.get_num_threads()]
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from numba import njit, prange
from attnres_serve.compat.workarounds import numba_threads

@njit(parallel=True)
def find(drafts):
    for place in prange(len(drafts)):
        drafts[place] += 1

numba_threads.launch_early()
for _ in range(2):
    find(numpy.zeros(8))
    answer.append(torch.get_num_threads())
"""
FLA_FIRST = f"{FLA}\n{REGISTER}\n{BESIDE_FLA}"
FLA_LAST = f"{REGISTER}\n{FLA}\n{BESIDE_FLA}"
ASKED = {"resolve": RESOLVE, "kimi": KIMI, "numba": NUMBA}
if find_spec("fla"):
    ASKED["fla"] = FLA_FIRST


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the scripts, about a foreign repository with a class of its own and FLA's keys."""
    root = tmp_path_factory.mktemp("fresh")
    folder = write_fla(root / "foreign")
    path = folder / "config.json"
    auto_map = {"auto_map": {"AutoConfig": "configuration_foo.FooConfig"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | auto_map))
    (folder / "configuration_foo.py").write_text(FOREIGN)
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "cache"), "OMP_NUM_THREADS": "2"}
    return dict(zip(ASKED, fresh.answers(ASKED.values(), folder, **own), strict=True))


def test_transformer_stays_free_for_foreign_repositories(answers: dict[str, Any]) -> None:
    """A repository with code of its own under this name resolves exactly as without the plugin."""
    without, with_plugin = answers["resolve"]
    assert with_plugin == without
    (trusted, content), (error, message) = with_plugin
    assert trusted == "FooConfig" and content["attnres_block_size"] == 4
    assert error != "FooConfig" and message


@pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention")
def test_beside_fla(answers: dict[str, Any]) -> None:
    """FLA's own AutoConfig keeps the name `transformer`; vLLM gets ours."""
    assert answers["fla"] == [True, 4, "LlamaConfig", True]


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention")
def test_before_fla() -> None:
    assert fresh.answers([FLA_LAST], HF_HUB_OFFLINE="1") == [[True, 4, "LlamaConfig", True]]


def test_a_cpu_imports_nothing_for_cuda(answers: dict[str, Any]) -> None:
    """And vLLM's package of Kimi K3 is as vLLM has it for whoever imports it later."""
    if not device.is_cpu():
        pytest.skip("no CPU build")
    loaded = answers["kimi"]
    assert "attnres_serve.model.kimi" in loaded
    assert not [name for name in loaded if name.startswith("vllm.models.kimi_k3.nvidia")]
    assert "vllm.models.kimi_k3" not in loaded and "llvmlite" not in loaded


def test_drafts_of_n_grams_leave_a_workers_threads_as_they_were(answers: dict[str, Any]) -> None:
    if not device.is_cpu():
        pytest.skip("no CPU build")
    assert answers["numba"] == [2, 2, 2]
