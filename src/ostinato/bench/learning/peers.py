"""A model with ``torch.nn``'s layers, to be trained beside the same model with ours."""

from typing import Any

from torch import nn

from ostinato.models import LanguageModel

TORCH_LAYERS = {"gru": nn.GRU, "lstm": nn.LSTM}


def with_torch_layers(model: LanguageModel) -> LanguageModel:
    """Replace our recurrent layers by ``torch.nn``'s with the same weights, without drawing random numbers.

    Raises ValueError for a model of another cell than ``"gru"`` and ``"lstm"``.

    >>> from ostinato.bench.learning.peers import with_torch_layers
    >>> from ostinato.models import LanguageModel
    >>> model = with_torch_layers(LanguageModel(65, width=8, num_layers=1, cell="gru"))
    >>> type(model.blocks[0].recurrent)
    <class 'torch.nn.modules.rnn.GRU'>
    """
    cell = model.settings["cell"]
    if cell not in TORCH_LAYERS:
        raise ValueError(f"cell must be one of {', '.join(TORCH_LAYERS)}, which torch.nn has too; got {cell!r}")
    for block in model.blocks:
        ours: Any = block.recurrent
        layer = TORCH_LAYERS[cell](ours.input_size, ours.hidden_size, batch_first=True, device="meta")
        layer.to_empty(device=ours.weight_hh_l0.device)
        layer.load_state_dict(ours.state_dict())
        block.recurrent = layer
    return model
