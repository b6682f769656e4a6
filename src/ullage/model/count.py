"""Parameters and FLOPs of a graph, before any layout divides it."""

from __future__ import annotations

from collections.abc import Iterable

from ullage.model.delta import CHUNK
from ullage.model.graph import SEQ, SEQ_SP, TARGET, Graph, Op

# Ops that multiply every token by a matrix. The embedding is a look-up, a norm's weight no matrix, a bias an addition.
_MATMULS = frozenset({"linear", "grouped_linear", "router", "shared_gate"})

FORWARD_FLOPS = 2
FROZEN_FLOPS = 4  # of a weight that is not trained: no gradient of it
# Forward, of a token and a head of the delta rule, each a multiplication and an addition: keys by keys, queries by keys, the inverse of a
# chunk's system by keys; that inverse by values, scores by values; what a state predicts, recalls and takes in.
OF_KEYS, OF_VALUES, OF_STATES = 3, 2, 3
SCAN_FLOPS = 7  # forward, of an element of a state: decayed, written and read
MATMUL_FLOPS = 6  # per weight and token: forward 2 (multiply and add), backward 4 (gradients of input and weight)


def parameter_count(graph: Graph) -> int:
    """Parameters, tied ones once, buffers left out."""
    return graph.parameter_count()


def active_parameter_count(graph: Graph) -> int:
    """Parameters that one token meets: of each mixture of experts top_k experts, everything else whole, the embedding too."""
    idle = sum(run.repeat * (_weights(graph, op) - _active(graph, op)) for run in graph.runs for op in run.block.ops)
    return graph.parameter_count() - idle


def flops_per_token(graph: Graph, seq_len: int) -> int:
    """FLOPs of one training step, forward and backward, divided by its tokens.

    Counted: 6 for each weight of a matmul that a token meets, 4 where it is frozen (active experts only; the head included, the embedding
    look-up not), and attention as 6 x heads x (head_dim + v_head_dim) x keys, which is 12 x hidden x seq_len a layer in the plain case
    (PaLM, arXiv 2204.02311, appendix B). keys is seq_len, or the window where that is shorter: the causal half is not taken off.
    The gated delta rule is three times its forward's matmuls in chunks of 64 tokens, triangles counted whole.
    A Mamba-2 scan is three times 7 x channels x state, as Megatron-LM counts it (training/training.py, mamba_layer_flops).
    What is done once for a sequence, as a classifier of the first token, counts by its share of a token; of images the patches alone are
    convolved, and ask for no gradient: 4 for each of those weights.
    Of an encoder and a decoder the tokens are the encoder's, the decoder's own counted by their share of them.
    Left out: norms, activations, softmax, rotary embedding, the optimizer, and whatever recomputation runs again.
    """
    return sum(run.repeat * _op_flops(graph, op, seq_len) for run in graph.runs for op in run.block.ops)


def forward_flops_per_token(graph: Graph, ops: Iterable[Op], seq_len: int) -> int:
    """FLOPs of these ops' forwards alone, counted like ``flops_per_token``: a third of what they count there."""
    found = ((op, _op_flops(graph, op, seq_len)) for op in ops)
    return sum(flops * FORWARD_FLOPS // (FROZEN_FLOPS if _is_frozen(op) else MATMUL_FLOPS) for op, flops in found)


def _op_flops(graph: Graph, op: Op, seq_len: int) -> int:
    """For each token that the model reads: where a decoder makes another text of it, its tokens count by what they are of those."""
    flops = _own_flops(graph, op, seq_len)
    return flops * _length(graph, TARGET, seq_len) // seq_len if flops and TARGET in op.outputs[0].dims else flops


def _length(graph: Graph, dim: object, seq_len: int) -> int:
    return (graph.size(TARGET) or seq_len) if dim == TARGET else seq_len


def _own_flops(graph: Graph, op: Op, seq_len: int) -> int:
    if op.kind == "attention":
        window = op.attrs["window"]
        length = _length(graph, op.attrs.get("keys"), seq_len)
        keys = min(length, window) if isinstance(window, int) else length
        return MATMUL_FLOPS * graph.size("heads") * (graph.size("head_dim") + graph.size("v_head_dim")) * keys
    if op.kind == "ssm":
        return MATMUL_FLOPS // FORWARD_FLOPS * SCAN_FLOPS * graph.size("ssm_inner") * graph.size("ssm_state")
    if op.kind == "conv2d":  # of the patches alone, and images ask for no gradient
        (weight, _) = op.params
        return FROZEN_FLOPS * graph.numel(weight) * graph.size("patches") // seq_len
    if op.kind == "delta_rule":
        return MATMUL_FLOPS * _of_delta_rule(*(graph.size(f"delta_{which}") for which in ("heads", "k_dim", "v_dim")))
    if op.kind not in _MATMULS:
        return 0
    if "shared" in op.attrs:  # a head that has its weight from the main one
        return MATMUL_FLOPS * graph.size("vocab") * graph.size("hidden")
    flops = sum(
        (MATMUL_FLOPS if param.trainable else FROZEN_FLOPS) * _share(graph, op, graph.numel(param))
        for param in op.params
        if param.name.endswith((".weight", ".lora_A", ".lora_B"))
    )
    of_tokens = {SEQ, SEQ_SP, TARGET} & {*op.outputs[0].dims} or op.of_experts
    return flops if of_tokens else flops // seq_len  # once a sequence


def _of_delta_rule(heads: int, k_dim: int, v_dim: int) -> int:
    """Multiplications of a token's forward (flash-linear-attention, fla/ops/gated_delta_rule/chunk.py)."""
    return heads * (CHUNK * (OF_KEYS * k_dim + OF_VALUES * v_dim) + OF_STATES * k_dim * v_dim)


def _is_frozen(op: Op) -> bool:
    return op.kind in _MATMULS and bool(op.params) and not any(param.trainable for param in op.params)


def _weights(graph: Graph, op: Op) -> int:
    return sum(graph.numel(param) for param in op.params if not param.buffer)


def _active(graph: Graph, op: Op) -> int:
    return _share(graph, op, _weights(graph, op))


def _share(graph: Graph, op: Op, weights: int) -> int:
    """Of an expert matmul top_k of all experts, of everything else all."""
    return weights * graph.size("top_k") // graph.size("experts") if op.kind == "grouped_linear" else weights
