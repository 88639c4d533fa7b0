"""A language model with any of the recurrent layers in its blocks, so that they can be compared."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ostinato.checks import check_integers, check_numbers, check_tensor, check_unsharded, describe
from ostinato.diagonal import HGRN, LRU, QRNN, RGLRU, SRU, IndRNN, ParaGRU, ParaLSTM
from ostinato.hub import HubMixin
from ostinato.minimal import HighwayMinGRU, MinGRU, MinLSTM
from ostinato.recurrent import GRU, LSTM
from ostinato.slstm import SLSTM
from ostinato.states import hidden_of, states_of
from ostinato.stepper import Stepper


class RecurrentLayer(Protocol):
    """What a block needs of a layer."""

    input_size: int
    hidden_size: int

    def __call__(self, input: Tensor, hx: Any, /) -> tuple[Tensor, Any]: ...

    def step(self, x: Tensor, state: Any, /) -> tuple[Tensor, Any]: ...

    def initial_state(self, batch_size: int, /) -> Any: ...


CELLS: dict[str, Callable[..., RecurrentLayer]] = {
    cell.__name__.lower(): cell
    for cell in (
        *(MinGRU, MinLSTM, GRU, LSTM, HighwayMinGRU),
        *(RGLRU, HGRN, LRU, QRNN, SRU, IndRNN, ParaGRU, ParaLSTM, SLSTM),
    )
}

# A block's state: the last inputs of its convolution, (B, K-1, W), and the state of its recurrent layer, (1, B, H), or
# a tuple of these, as for the LSTM.
BlockState = tuple[Tensor, Any]
State = list[BlockState]


class CausalConv(nn.Module):
    r"""Causal depthwise convolution over time; the identity if ``kernel_size`` is 0.

    .. math:: y_t = b + \sum_{k=0}^{K-1} w_k \odot x_{t-K+1+k}
    """

    sequence_group: Callable[[], ProcessGroup] | None = None  # over whose processes sequences are sharded

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        if kernel_size:
            bound = kernel_size**-0.5
            self.weight = nn.Parameter(torch.empty(kernel_size, channels).uniform_(-bound, bound))
            self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """y, (B, T, W), and the last K - 1 inputs, from x, (B, T, W), and the K - 1 inputs before it."""
        if not self.kernel_size:
            return x, last
        steps, after = x.size(1), None
        if self.sequence_group is not None:
            from ostinato.distributed.layers import steps_before

            last, after = steps_before(x, last, self.sequence_group())
        # A sum of shifted inputs: PyTorch's convolutions take time last, which would need two transpositions.
        x = torch.cat([last, x], dim=1)
        y: Tensor = self.bias
        for k in range(self.kernel_size):
            y = torch.addcmul(y, x[:, k : k + steps], self.weight[k])
        return y, x[:, steps:] if after is None else after


class Block(nn.Module):
    """A pre-norm residual block: ``x + recurrence(norm(x))``, then ``x + mlp(norm(x))``.

    The recurrence is a short causal convolution, the recurrent layer, and a projection back to the width.
    """

    sequence_group: Callable[[], ProcessGroup] | None = None  # over whose processes sequences are sharded
    recurrent: RecurrentLayer

    def __init__(
        self,
        width: int,
        hidden_size: int,
        cell: str,
        conv_kernel: int,
        mlp_ratio: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.recurrent_norm = nn.LayerNorm(width, bias=False)
        self.conv = CausalConv(width, conv_kernel)
        self.recurrent = CELLS[cell](width, hidden_size, batch_first=True)
        self.num_states = len(states_of(self.recurrent.initial_state(0)))
        self.projection = nn.Linear(hidden_size, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        inner = round(mlp_ratio * width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width, bias=False))
        self.dropout = nn.Dropout(dropout)

    def initial_state(self, batch_size: int, like: Tensor) -> BlockState:
        """Zeros of the dtype and device of `like`: this block's own parameters may be sharded by now."""
        last = like.new_zeros(batch_size, max(self.conv.kernel_size - 1, 0), self.recurrent.input_size)
        hidden = like.new_zeros(1, batch_size, self.recurrent.hidden_size)
        return last, hidden_of([hidden] * self.num_states)

    def forward(self, x: Tensor, state: BlockState) -> tuple[Tensor, BlockState]:
        last, hidden = state
        y, last = self.conv(self.recurrent_norm(x), last)
        if x.size(1) == 1 and self.sequence_group is None:
            y, hidden = self.recurrent.step(y[:, 0], hidden)
            y = y[:, None]
        else:
            y, hidden = self.recurrent(y, hidden)
        x = x + self.dropout(self.projection(y))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x, (last, hidden)


class LanguageModel(nn.Module, HubMixin, library_name="ostinato", pipeline_tag="text-generation"):
    """Autoregressive language model: embedding, residual blocks with a recurrent layer each, norm, and linear head.

    ``save_pretrained(folder)``, ``from_pretrained(name)`` and ``push_to_hub(name)`` store and load a model, its
    arguments and its pruning masks in the format of the Hugging Face hub; they need the extra ``hub``.

    Args:
        vocab_size: number of tokens, V.
        width: channels between the blocks, W.
        num_layers: number of blocks.
        cell: the recurrent layer of every block, a key of ``CELLS`` such as "mingru" or "lstm".
        expansion: the recurrent layer's hidden size, as a multiple of ``width``.
        conv_kernel: steps of the causal convolution before each recurrent layer, K; 0 for none.
        mlp_ratio: the MLP's inner size, as a multiple of ``width``.
        dropout: probability, in [0, 1), after the embedding, each recurrence and each MLP.

    Attributes:
        settings: all arguments by name: ``LanguageModel(**model.settings)`` is a new model like this one.

    Raises:
        TypeError: a size that is not an integer, or a ratio or dropout that is not a number.
        ValueError: a size below 1, an unknown cell, or a dropout outside [0, 1).

    Example:
        >>> import torch
        >>> from ostinato.models import LanguageModel
        >>> model = LanguageModel(vocab_size=65, width=32, num_layers=2)
        >>> logits, state = model(torch.randint(65, (8, 100)))
        >>> logits.shape
        torch.Size([8, 100, 65])
        >>> logits, state = model.step(logits[:, -1].argmax(-1), state)  # time step 101
        >>> logits.shape
        torch.Size([8, 65])
    """

    sequence_group: Callable[[], ProcessGroup] | None = None  # over whose processes sequences are sharded
    __call__: Callable[..., tuple[Tensor, State]]

    def __init__(
        self,
        vocab_size: int,
        *,
        width: int = 384,
        num_layers: int = 3,
        cell: str = "mingru",
        expansion: float = 1.5,
        conv_kernel: int = 4,
        mlp_ratio: float = 4.0,
        dropout: float = 0.3,
    ) -> None:
        super().__init__()
        check_integers(1, vocab_size=vocab_size, width=width, num_layers=num_layers)
        check_integers(0, conv_kernel=conv_kernel)
        check_numbers(expansion=expansion, mlp_ratio=mlp_ratio, dropout=dropout)
        for name, ratio in (("expansion", expansion), ("mlp_ratio", mlp_ratio)):
            if not 0 < ratio < math.inf:
                raise ValueError(f"{name} must be above 0 and finite; got {ratio}")
        hidden_size = round(expansion * width)
        sizes = {"hidden_size, expansion * width,": hidden_size, "mlp_ratio * width": round(mlp_ratio * width)}
        check_integers(1, **sizes)
        if not isinstance(cell, str) or cell not in CELLS:
            raise ValueError(f"cell must be one of {', '.join(CELLS)}; got {cell!r}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1; got {dropout}")
        self.settings: dict[str, Any] = {
            "vocab_size": vocab_size,
            "width": width,
            "num_layers": num_layers,
            "cell": cell,
            "expansion": expansion,
            "conv_kernel": conv_kernel,
            "mlp_ratio": mlp_ratio,
            "dropout": dropout,
        }
        self.hidden_size = hidden_size
        # The initialisation of nn.Embedding, which on "meta" would import PyTorch's compiler.
        self.embedding = nn.Embedding.from_pretrained(torch.randn(vocab_size, width), freeze=False)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, hidden_size, cell, conv_kernel, mlp_ratio, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def initial_state(self, batch_size: int) -> State:
        """The state before the first token: all zeros.

        Raises TypeError for a batch size that is no integer, ValueError for one below 0.
        """
        check_integers(0, batch_size=batch_size)
        like, blocks = self.embedding.weight, cast(Iterable[Block], self.blocks)
        return [block.initial_state(batch_size, like) for block in blocks]

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The logits of every next token.

        Args:
            tokens: (B, T), integers below V.
            state: the state before the first token, from an earlier call; zero if absent.

        Returns:
            logits, (B, T, V), and the state after the last token: a text in two calls gives the logits of one call.

        Raises:
            TypeError: tokens that are not a tensor of torch.int64 or torch.int32, or a state that is no list of pairs.
            ValueError: tokens that are not (B, T), or a state of another number of blocks or sequences.
        """
        check_tokens("tokens", tokens, "(B, T)", 2)
        if state is None:
            state = self.initial_state(tokens.size(0))
        self._check_state(state, tokens.size(0))
        x = self.dropout(self.embedding(tokens))
        after = []
        for block, before in zip(self.blocks, state, strict=True):
            x, new = block(x, before)
            after.append(new)
        return self.head(self.norm(x)), after

    def _check_state(self, state: State, batch_size: int) -> None:
        """Raise TypeError or ValueError unless it fits the blocks; recurrent layers check their own parts."""
        if not isinstance(state, list | tuple):
            raise TypeError(f"state must be a list with a part for each block; got {describe(state)}")
        if len(state) != len(self.blocks):
            raise ValueError(f"state must have a part for each of {len(self.blocks)} blocks; got {len(state)}")
        for index, (block, part) in enumerate(zip(cast(Iterable[Block], self.blocks), state, strict=True)):
            if not isinstance(part, list | tuple) or len(part) != 2:
                raise TypeError(
                    f"state[{index}] must be a pair, the convolution's and the layer's; got {describe(part)}"
                )
            check_tensor(f"state[{index}][0]", part[0])
            expected = batch_size, max(block.conv.kernel_size - 1, 0), block.recurrent.input_size
            if part[0].shape != expected:
                raise ValueError(f"state[{index}][0] must have shape {expected}; got {tuple(part[0].shape)}")

    def step(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        """One time step in constant time and memory: the logits, (B, V), after ``token``, (B,), and the new state.

        Shapes are static and nothing synchronises with the device, so a CUDA graph can capture it.

        Raises:
            TypeError: a token that is not a tensor of torch.int64 or torch.int32.
            ValueError: a token that is not (B,), or a model that takes shards of sequences.
        """
        check_unsharded("step", self.sequence_group)
        check_tokens("token", token, "(B,)", 1)
        logits, state = self(token[:, None], state)
        return logits[:, 0], state

    def generate(
        self,
        prompt: Tensor,
        length: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Sample a continuation of a prompt, one token at a time; dropout is off meanwhile.

        Args:
            prompt: (B, T), T >= 1.
            length: number of tokens to generate.
            temperature: tokens are drawn from softmax(logits / temperature), at 0 the likeliest one.
            top_k: draw among the k likeliest tokens only; among all if absent.
            generator: random numbers, on the model's device; PyTorch's own if absent.

        Yields:
            Each token as it is drawn, (B,).

        Raises:
            TypeError: a prompt that is not a tensor of torch.int64 or torch.int32, a length or ``top_k`` that is not an
                integer, a temperature that is not a number, a generator that is not PyTorch's.
            ValueError: an empty prompt, a negative length or temperature, a ``top_k`` below 1, or a model that takes
                shards of sequences.

        Example:
            >>> import torch
            >>> from ostinato.models import LanguageModel
            >>> model = LanguageModel(vocab_size=65, width=8, num_layers=1)
            >>> torch.stack([*model.generate(torch.zeros(2, 1, dtype=torch.int64), 5)], 1).shape
            torch.Size([2, 5])
        """
        check_unsharded("generate", self.sequence_group)
        check_tokens("prompt", prompt, "(B, T)", 2)
        if prompt.numel() == 0:
            raise ValueError(f"prompt must have at least one token; got shape {tuple(prompt.shape)}")
        check_integers(0, length=length)
        check_integers(1, top_k=1 if top_k is None else top_k)
        check_numbers(temperature=temperature)
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature must be finite and at least 0; got {temperature}")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator; got {describe(generator)}")
        return self._continue(prompt, length, lambda logits: draw(logits, temperature, top_k, generator))

    @torch.no_grad()
    def _continue(self, prompt: Tensor, length: int, choose: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        with evaluating(self):
            all_logits, state = self(prompt)
            logits, step = all_logits[:, -1], Stepper(self, len(prompt))
            step.state = state
            for remaining in reversed(range(length)):
                token = choose(logits)
                yield token
                if remaining:
                    logits = step(token)


def check_tokens(name: str, tokens: object, shape: str, rank: int) -> None:
    """Raise TypeError or ValueError unless they are a tensor of integers with `rank` dimensions."""
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be a tensor of torch.int64 or torch.int32; got {describe(tokens)}")
    if tokens.dim() != rank:
        raise ValueError(f"{name} must have shape {shape}; got {tuple(tokens.shape)}")


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set a module and its submodules to evaluation mode, without dropout, and restore each one's mode afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Sample tokens, (B,), from logits, (B, V); see :meth:`LanguageModel.generate`."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float()
    if top_k is not None and top_k < logits.size(-1):
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    # Beyond float32's range a temperature would become 0 or infinity, and some quotients NaN.
    float32 = torch.finfo(torch.float32)
    temperature = float(
        min(max(temperature, float32.tiny), float32.max)
    )  # PyTorch takes neither large ints nor Fractions
    # The largest logit is subtracted first: with a small temperature the quotient could overflow.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]
