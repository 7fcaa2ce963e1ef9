"""What the server asks of vLLM's workers, by name through ``collective_rpc``.

What may fail answers with a sentence and never raises: vLLM would leave the other workers' answers
unread, and take them for those to a later call.
"""

from typing import Any

from attnres_serve.compat import decoder, host, replay


class WorkerExtension:
    """Methods added to vLLM's worker class."""

    def attn_res_executed(self) -> dict[str, dict[str, int]]:
        """Forward passes of this worker by algorithm, eager and compiled."""
        return decoder.inner_model(self).attn_res_executed()

    def attn_res_backend(self) -> str | None:
        """What computes the sites of this worker; None with standard residuals."""
        return decoder.inner_model(self).attn_res_backend

    def attn_res_untraceable(self) -> str | None:
        """Why there are no traces on this worker, in one sentence; None if there are."""
        try:
            return replay.untraceable(self)
        except Exception:  # the attention of a vLLM that was not tested may be another
            host.logger().exception("AttnRes: traces are off")
            return "there are no traces on this server; its log says why."

    def attn_res_trace(
        self, ids: list[int], positions: list[int], sites: list[int]
    ) -> dict[str, Any]:
        """Trace a sequence, see ``trace.record``.

        Returns:
            ``problem``: a sentence, or None.  ``sites``: of this pipeline stage, from its first
            worker; for each its index, weights and RMS of the sources, both as the bytes of
            ``[tokens, sources]`` float32.
        """
        from attnres_serve.inspect import record
        from attnres_serve.model.site_norm import SiteOrderError

        try:
            traces = record.record(self, ids, positions, sites)
        except (record.TraceError, SiteOrderError) as error:
            host.logger().exception("AttnRes: a trace failed")
            return {"problem": str(error), "sites": []}
        except Exception:  # its text may name files and addresses, and clients read the problem
            host.logger().exception("AttnRes: a trace failed")
            return {"problem": "the trace failed; the server's log says why.", "sites": []}
        if not decoder.is_first_tensor_rank():  # the others hold the same
            traces = {}
        found = [
            [index, *(tensor.float().numpy().tobytes() for tensor in site)]
            for index, site in sorted(traces.items())
        ]
        return {"problem": None, "sites": found}
