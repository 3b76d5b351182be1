"""torchvision, which transformers imports, takes help beside a CPU build of PyTorch: before any
test imports either.
"""

import dpcompanion.huggingface  # noqa: F401
