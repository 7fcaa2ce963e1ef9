"""Methods of vLLM's workers that the server calls by name through ``collective_rpc``.

Methods that may fail return a sentence and never raise: vLLM would leave the other workers' answers
unread, and take them for answers to a later call.
"""

from collections.abc import Sequence
from typing import Any

from attnres_serve.compat import decoder, host, replay
from attnres_serve.errors import SettingError


class WorkerExtension:
    """Methods added to vLLM's worker class."""

    def attn_res_executed(self) -> dict[str, dict[str, int]]:
        """Forward passes of this worker by algorithm, eager and compiled."""
        return decoder.inner_model(self).attn_res_executed()

    def attn_res_backend(self) -> str | None:
        """The backend of the sites in this worker; None with standard residuals."""
        return decoder.inner_model(self).attn_res_backend

    def attn_res_algorithm(self) -> str | None:
        """The algorithm of the sites in this worker; None with standard residuals."""
        return decoder.inner_model(self).attn_res_algorithm

    def attn_res_untraceable(self) -> str | None:
        """The reason why this worker has no traces, in one sentence; None if it has."""
        try:
            return replay.trace_problem(self)
        except Exception:  # an untested vLLM may have another attention
            host.logger().exception("AttnRes: traces are off")
            return "there are no traces on this server; its log says why."

    def attn_res_change_edits(self, edits: list[dict[str, Any]]) -> str | None:
        """Replace the edits; returns the problem in one sentence, or None."""
        from attnres_serve.depth import static_edits
        from attnres_serve.model.config import spec_of

        try:
            model = decoder.inner_model(self)
            parsed = static_edits.from_json(edits, "edits")
            model.attn_res_edited.change(static_edits.resolve(parsed, spec_of(model.config)))
        except SettingError as error:
            return str(error)
        except Exception:
            host.logger().exception("AttnRes: edits could not be changed")
            return "edits could not be changed; the engine's log says why."
        return None

    def attn_res_trace(
        self,
        ids: list[int],
        positions: list[int],
        sites: list[int],
        edits: Sequence[Sequence[Any]] = (),
        predicted: tuple[list[int], int] | None = None,
        lens: Sequence[Any] | None = None,
        vectors: bool = False,
    ) -> dict[str, Any]:
        """Trace a sequence, see ``record.record``.

        Args:
            ids: the sequence.
            positions: the tokens to trace, ascending.
            sites: indices.
            edits: the fields of each ``resolved_edits.Resolved``.
            predicted: the tokens after those at ``positions``, and the number of most probable
                tokens to return; None for no logprobs.
            lens: the fields of a ``readings.Lens``; None for none.
            vectors: whether to return vectors of the sites.

        Returns:
            ``problem``: a sentence, or None.  ``sites``: of this pipeline stage, from its first
            worker; for each its index, weights and RMS of the sources, both as the bytes of
            ``[tokens, sources]`` float32.  ``predicted``: from the first worker of the last stage,
            the result of ``Predictions.packed``, and ``lens`` the same for all readings in turn.
            ``vectors``: from the first worker of each stage, the result of ``Vectors.packed``.
        """
        from attnres_serve.model.site_norm import SiteOrderError
        from attnres_serve.tracing.record import TraceError

        try:
            traced = _traced(self, ids, positions, sites, edits, predicted, lens, vectors)
            return {"problem": None} | traced
        except Exception as error:
            host.logger().exception("AttnRes: the trace failed")
            # Other messages may name files and addresses, and clients read the problem.
            is_ours = isinstance(error, (TraceError, SiteOrderError))
            problem = str(error) if is_ours else "the trace failed; the engine's log says why."
            return {"problem": problem, "sites": [], "predicted": None, "lens": None, "vectors": {}}


def _traced(
    worker: Any,
    ids: list[int],
    positions: list[int],
    sites: list[int],
    edits: Sequence[Sequence[Any]],
    predicted: tuple[list[int], int] | None,
    lens: Sequence[Any] | None,
    vectors: bool,
) -> dict[str, Any]:
    from attnres_serve.depth.resolved_edits import Resolved
    from attnres_serve.tracing import predict, readings, record
    from attnres_serve.tracing.lens import Reader
    from attnres_serve.tracing.vectors import Vectors

    predictions = predicted and predict.Predictions(positions, *predicted)
    resolved = [Resolved(*edit) for edit in edits]
    reader = None if lens is None else Reader(readings.Lens(*lens))
    recorded = Vectors(positions) if vectors else None
    traces = record.record(worker, ids, positions, sites, resolved, predictions, reader, recorded)
    packed = predictions.packed() if predictions else None
    read = reader.predictions.packed() if reader else None
    if not decoder.is_first_tensor_rank():  # the others hold the same
        traces, packed, read, recorded = {}, None, None, None
    weights = [
        [index, *(tensor.float().numpy().tobytes() for tensor in site)]
        for index, site in sorted(traces.items())
    ]
    of_sites = recorded.packed() if recorded else {}
    return {"sites": weights, "predicted": packed, "lens": read, "vectors": of_sites}
