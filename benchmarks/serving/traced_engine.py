"""The engine of ``attnres-serve bench``, traced between requests: what ``trace_cost`` measures."""

import sys
from typing import Any

from attnres_serve.bench import engine
from attnres_serve.bench.workload import WARM_STEPS, WARM_TOKENS
from attnres_serve.model.config import spec_of


class Traced(engine.Bench):
    """An engine that replays a sequence before every request that only warms the caches.

    So a request that is timed is not traced, comes after many that were, and finds the caches as
    in an engine without traces.
    """

    def generate(self, prompts: list[list[int]], max_tokens: int, **options: Any) -> dict[str, Any]:
        if max_tokens == WARM_STEPS:
            self.trace()
        return super().generate(prompts, max_tokens, **options)

    def trace(self) -> None:
        """Trace some tokens at every site.

        Raises:
            RuntimeError: there is no trace; the sentence says why.
        """
        tokens = list(range(WARM_TOKENS))
        spec = spec_of(self.engine.vllm_config.model_config.hf_config)
        assert spec is not None, "the traced engine has sites"
        asked = tokens, tokens, list(range(spec.num_sublayers + 1))
        for worker in self.engine.collective_rpc("attn_res_trace", args=asked):
            if worker["problem"] is not None or not worker["sites"]:
                raise RuntimeError(worker["problem"] or "no site was traced.")


if __name__ == "__main__":
    engine.Bench = Traced  # type: ignore[misc]
    engine.main(sys.argv[1:])
