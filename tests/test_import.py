"""What importing this library loads and queries, in a fresh interpreter that is started once."""

import subprocess
import sys

IMPORT = """
import sys, torch
compilers = {"numba", "torch._dynamo", "torch._inductor", "torch._decomp", "sympy"}
before = compilers & {*sys.modules}
torch.cuda.is_available = lambda: 1 / 0
sys.modules["huggingface_hub"] = None
import ostinato, ostinato.numpy
print("compilers:", *(compilers & {*sys.modules}) - before)
from ostinato.models import LanguageModel
model = LanguageModel(11, width=8)
for call in (model.save_pretrained, model.push_to_hub, LanguageModel.from_pretrained):
    try:
        call("somewhere")
    except ImportError as error:
        print(error)
"""


def test_an_import_leaves_compilers_cuda_and_the_hub_alone():
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "compilers:",
        *3 * ["models are saved for the Hugging Face hub by huggingface_hub: pip install 'ostinato[hub]'"],
    ]
