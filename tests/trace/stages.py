"""Modules that torch.distributed.pipelining cuts in two, whole and as the stages that it runs: what crosses is a tuple of tensors."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu

WIDTH, VOCABULARY, SEQ, BATCH, MICRO_BATCHES = 64, 500, 24, 2, 4
SHARDS = 2


class Masked(nn.Module):
    """Reads a mask beside the hidden states."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden, mask):
        return hidden + self.down(gelu(self.up(self.norm(hidden * mask))))


class MaskedModel(nn.Module):
    """Four layers that read the hidden states and one mask, made once."""

    split = (2, 2)

    def __init__(self, stage=None):
        super().__init__()
        self.embed = None if stage == 1 else nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Masked() for _ in range(4 if stage is None else 2))
        self.head = None if stage == 0 else nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden, mask=None):
        if self.embed is not None:
            mask = (hidden > 3).float().unsqueeze(-1).expand(-1, -1, WIDTH).contiguous()
            hidden = self.embed(hidden)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return (hidden, mask) if self.head is None else self.head(hidden)

    @staticmethod
    def handed():
        return torch.empty(BATCH, SEQ, WIDTH, requires_grad=True), torch.empty(BATCH, SEQ, WIDTH)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, encoded):
        return encoded + torch.tanh(self.mix(self.norm(encoded)))


class Decoder(nn.Module):
    """Attends to what the encoder left."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden, encoded):
        scores = self.query(self.norm(hidden)) @ self.key(encoded).transpose(1, 2)
        return hidden + self.out(scores.softmax(-1) @ encoded)


class EncoderDecoder(nn.Module):
    """Two layers of an encoder, two of a decoder; the last is the second stage's, so that the encoder's output crosses, with a gradient."""

    split = (3, 1)

    def __init__(self, stage=None):
        super().__init__()
        self.embed = None if stage == 1 else nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Encoder() for _ in range(0 if stage == 1 else 2))
        self.decoder = nn.ModuleList(Decoder() for _ in range(2 if stage is None else 1))
        self.head = None if stage == 0 else nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden, encoded=None):
        if self.embed is not None:
            hidden = self.embed(hidden)
            encoded = hidden
            for layer in self.encoder:
                encoded = layer(encoded)
        for layer in self.decoder:
            hidden = layer(hidden, encoded)
        return (hidden, encoded) if self.head is None else self.head(hidden)

    @staticmethod
    def handed():
        return torch.empty(BATCH, SEQ, WIDTH, requires_grad=True), torch.empty(BATCH, SEQ, WIDTH, requires_grad=True)


def loss(output, target):
    return cross_entropy(output.flatten(0, 1), target.flatten())


def whole(kind):
    """A factory of the model in one piece."""

    def made():
        model = kind()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.randint(0, VOCABULARY, (BATCH, SEQ))

        def step():
            loss(model(ids), ids).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return made


def stage(kind, index, schedule):
    """A factory of one stage of two, each sharded by FSDP2 over two ranks."""

    def made():
        from torch.distributed import pipelining
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.pipelining._utils import InferenceMode

        mesh = init_device_mesh("cpu", (2, SHARDS), mesh_dim_names=("pp", "dp"))
        model = kind(index)
        layers = [layer for found in model.children() if isinstance(found, nn.ModuleList) for layer in found]
        for module in (*layers, model):
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
        ids = torch.randint(0, VOCABULARY, (BATCH * MICRO_BATCHES, SEQ))
        logits = torch.empty(BATCH, SEQ, VOCABULARY, requires_grad=True)
        runner = pipelining.PipelineStage(
            model,
            index,
            2,
            torch.device("cpu"),
            input_args=kind.handed() if index else (ids[:BATCH],),
            output_args=(logits,) if index else kind.handed(),
            group=mesh["pp"].get_group(),
        )
        scheduled = getattr(pipelining, schedule)(runner, MICRO_BATCHES, loss_fn=loss)

        def voted(stages, *_):  # the stages agree on what both were told above; a fake process group has no peer to ask
            for one in stages:
                one._inference_mode = InferenceMode.STATIC

        scheduled._warmup_p2p = voted
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step():
            if index:
                scheduled.step(target=ids, losses=[], return_outputs=False)
            else:
                scheduled.step(ids)
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return made
