"""PyTorch peers of `benchmarks/train.py`: the same Transformer in PyTorch, trained on the same arrays.

marian: `MarianMTModel` of Hugging Face transformers. torch: `torch.nn.Transformer` with the parts that it
lacks: embeddings, sinusoidal positions and the tied output projection. Both are post-norm, with fused Adam
and PyTorch's cross-entropy with label smoothing.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_worker import PRODUCT_SIZE, System

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.shapes import Batch


class TorchTransformer(nn.Module):
    """nn.Transformer from ids to logits, without its default layer norms after the last layers."""

    def __init__(self, model: ModelConfig, *, vocabulary: int, longest: int) -> None:
        super().__init__()
        width, rate = model.model_dim, model.dropout_rate
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.register_buffer("sinusoids", _sinusoids(longest, width))
        self.dropout = nn.Dropout(rate)
        sizes = {"d_model": width, "nhead": model.num_heads, "dim_feedforward": model.ffn_dim}
        options = {**sizes, "dropout": rate, "activation": "relu", "batch_first": True}
        self.transformer = nn.Transformer(
            custom_encoder=nn.TransformerEncoder(
                nn.TransformerEncoderLayer(**options), model.num_encoder_layers, enable_nested_tensor=False
            ),
            custom_decoder=nn.TransformerDecoder(
                nn.TransformerDecoderLayer(**options), model.num_decoder_layers
            ),
            **options,
        )
        self.scale = math.sqrt(width)

    def forward(self, source: Tensor, target_in: Tensor, source_padding: Tensor) -> Tensor:
        """Return logits [B, T, V]; source_padding [B, S] is True at padding."""
        length = target_in.shape[1]
        hidden = self.transformer(
            self._embed(source),
            self._embed(target_in),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(length, device=target_in.device),
            tgt_is_causal=True,
            src_key_padding_mask=source_padding,
            memory_key_padding_mask=source_padding,
        )
        return F.linear(hidden, self.embedding.weight)

    def _embed(self, ids: Tensor) -> Tensor:
        return self.dropout(self.embedding(ids) * self.scale + self.sinusoids[: ids.shape[1]])


def _sinusoids(length: int, width: int) -> Tensor:
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def make_marian(config: Config, *, vocabulary: int, longest: int, attention: str) -> nn.Module:
    """Build a MarianMTModel with the sizes of the config; the model is always post-norm."""
    from transformers import MarianConfig, MarianMTModel

    model, rate = config.model, config.model.dropout_rate
    return MarianMTModel(
        MarianConfig(
            vocab_size=vocabulary,
            max_position_embeddings=longest,
            d_model=model.model_dim,
            encoder_layers=model.num_encoder_layers,
            decoder_layers=model.num_decoder_layers,
            encoder_attention_heads=model.num_heads,
            decoder_attention_heads=model.num_heads,
            encoder_ffn_dim=model.ffn_dim,
            decoder_ffn_dim=model.ffn_dim,
            activation_function="relu",
            dropout=rate,
            attention_dropout=rate,
            activation_dropout=rate,
            scale_embedding=True,
            use_cache=False,
            pad_token_id=config.vocab.pad_id,
            eos_token_id=config.vocab.eos_id,
            decoder_start_token_id=config.vocab.bos_id,
            attn_implementation=attention,
        )
    )


def make_peer(name: str, config: Config, batches: list[Batch], task: dict[str, Any]) -> System:
    """Build the model and the optimizer of a peer, ready to train."""
    torch.manual_seed(config.seed)
    if task["device"] == "cpu":
        torch.set_num_threads(task["threads"])
    device = torch.device("cuda" if task["device"] == "gpu" else "cpu")
    longest = max(max(batch.source.shape[1], batch.target_in.shape[1]) for batch in batches)
    if name == "marian":
        network = make_marian(
            config, vocabulary=task["vocabulary"], longest=longest, attention=task["marian_attention"]
        )
    else:
        network = TorchTransformer(config.model, vocabulary=task["vocabulary"], longest=longest)
    network.to(device).train()
    optim = config.optim
    optimizer = torch.optim.Adam(
        network.parameters(),
        lr=optim.learning_rate,
        betas=(optim.b1, optim.b2),
        eps=optim.epsilon,
        fused=True,
    )
    loss_of = functools.partial(
        _marian_loss if name == "marian" else _torch_loss, network, smoothing=config.train.label_smoothing
    )
    if task["torch_compile"]:
        loss_of = torch.compile(loss_of, dynamic=False)
    bfloat16 = task["peer_dtype"] == "bfloat16"
    loss_of = torch.autocast(device.type, torch.bfloat16, enabled=bfloat16)(loss_of)
    square = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=device)
    facts = {
        "parameters": sum(p.numel() for p in network.parameters() if p.requires_grad),
        "versions": _versions(name),
        "threads": torch.get_num_threads(),
        "device_kind": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "compiled": task["torch_compile"],
        "dtype": task["peer_dtype"],
    }
    train = functools.partial(_train, loss_of, optimizer, batches, device)
    return System(train, lambda: (square @ square)[0, 0].item(), facts)


def _train(
    loss_of: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    device: torch.device,
    numbers: list[int],
) -> float:
    for number in numbers:
        batch = batches[number]
        source, target_in, target_out, source_mask, target_mask = (
            torch.from_numpy(array).to(device, non_blocking=True)
            for array in (
                batch.source,
                batch.target_in,
                np.where(batch.target_mask, batch.target_out, -100).astype(np.int64),
                batch.source_mask,
                batch.target_mask,
            )
        )
        loss_sum = loss_of(source, target_in, target_out, source_mask)
        loss = loss_sum / target_mask.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def _cross_entropy(logits: Tensor, target_out: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1),
        target_out.flatten(),
        label_smoothing=smoothing,
        ignore_index=-100,
        reduction="sum",
    )


def _marian_loss(
    network: nn.Module,
    source: Tensor,
    target_in: Tensor,
    target_out: Tensor,
    source_mask: Tensor,
    *,
    smoothing: float,
) -> Tensor:
    logits = network(input_ids=source, attention_mask=source_mask, decoder_input_ids=target_in).logits
    return _cross_entropy(logits, target_out, smoothing)


def _torch_loss(
    network: nn.Module,
    source: Tensor,
    target_in: Tensor,
    target_out: Tensor,
    source_mask: Tensor,
    *,
    smoothing: float,
) -> Tensor:
    return _cross_entropy(network(source, target_in, ~source_mask), target_out, smoothing)


def _versions(name: str) -> dict[str, str]:
    versions = {"torch": torch.__version__}
    if name == "marian":
        import transformers

        versions["transformers"] = transformers.__version__
    return versions
