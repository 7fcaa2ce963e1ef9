"""What the server asks of vLLM's workers, by name through ``collective_rpc``.

What may fail answers with a sentence and never raises: vLLM would leave the other workers' answers
unread, and take them for those to a later call.
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
        """What computes the sites of this worker; None with standard residuals."""
        return decoder.inner_model(self).attn_res_backend

    def attn_res_algorithm(self) -> str | None:
        """How the sites of this worker attend; None with standard residuals."""
        return decoder.inner_model(self).attn_res_algorithm

    def attn_res_untraceable(self) -> str | None:
        """Why there are no traces on this worker, in one sentence; None if there are."""
        try:
            return replay.untraceable(self)
        except Exception:  # the attention of a vLLM that was not tested may be another
            host.logger().exception("AttnRes: traces are off")
            return "there are no traces on this server; its log says why."

    def attn_res_change_edits(self, edits: list[dict[str, Any]]) -> str | None:
        """Serve under these edits and no others; why not, in one sentence, or None."""
        from attnres_serve.depth import static_edits
        from attnres_serve.model.config import spec_of

        try:
            model = decoder.inner_model(self)
            found = static_edits.from_json(edits, "edits")
            model.attn_res_edited.change(static_edits.resolve(found, spec_of(model.config)))
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
            positions: ascending, the tokens that are traced.
            sites: indices.
            edits: the fields of each ``edits.Resolved``.
            predicted: the tokens that follow those at ``positions``, and how many of the most
                probable ones are wanted; None for no logprobs.
            lens: the fields of a ``readings.Lens``; None for none.
            vectors: whether those of the sites are wanted.

        Returns:
            ``problem``: a sentence, or None.  ``sites``: of this pipeline stage, from its first
            worker; for each its index, weights and RMS of the sources, both as the bytes of
            ``[tokens, sources]`` float32.  ``predicted``: from the first worker of the last stage
            what ``Predictions.packed`` gives, and ``lens`` the same of one reading after the other.
            ``vectors``: from the first worker of each stage what ``Vectors.packed`` gives.
        """
        from attnres_serve.model.site_norm import SiteOrderError
        from attnres_serve.tracing.record import TraceError

        try:
            found = _traced(self, ids, positions, sites, edits, predicted, lens, vectors)
            return {"problem": None} | found
        except Exception as error:
            host.logger().exception("AttnRes: the trace failed")
            # The text of another may name files and addresses, and clients read the problem.
            is_ours = isinstance(error, (TraceError, SiteOrderError))
            said = str(error) if is_ours else "the trace failed; the engine's log says why."
            return {"problem": said, "sites": [], "predicted": None, "lens": None, "vectors": {}}


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
    from attnres_serve.depth import edits as edit_lists
    from attnres_serve.tracing import predict, readings, record
    from attnres_serve.tracing.lens import Reader
    from attnres_serve.tracing.vectors import Vectors

    predictions = predicted and predict.Predictions(positions, *predicted)
    resolved = [edit_lists.Resolved(*edit) for edit in edits]
    reader = None if lens is None else Reader(readings.Lens(*lens))
    own = Vectors(positions) if vectors else None
    traces = record.record(worker, ids, positions, sites, resolved, predictions, reader, own)
    packed = predictions.packed() if predictions else None
    read = reader.predictions.packed() if reader else None
    if not decoder.is_first_tensor_rank():  # the others hold the same
        traces, packed, read, own = {}, None, None, None
    found = [
        [index, *(tensor.float().numpy().tobytes() for tensor in site)]
        for index, site in sorted(traces.items())
    ]
    of_sites = own.packed() if own else {}
    return {"sites": found, "predicted": packed, "lens": read, "vectors": of_sites}
