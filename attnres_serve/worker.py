"""What the server asks of vLLM's workers, by name through ``collective_rpc``."""

from attnres_serve import compat


class WorkerExtension:
    """Methods added to vLLM's worker class."""

    def attn_res_executed(self) -> dict[str, dict[str, int]]:
        """Forward passes of this worker by algorithm, eager and compiled."""
        return compat.inner_model(self).attn_res_executed()

    def attn_res_backend(self) -> str | None:
        """What computes the sites of this worker; None with standard residuals."""
        return compat.inner_model(self).attn_res_backend
