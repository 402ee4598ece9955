"""What the server of data workers imports once for all of them: torch for resizing, and open_clip's tokenizers.

open_clip would import transformers and wandb, which takes seconds. A worker whose tokenizer needs transformers imports
it itself.

While it imports, the server is killed when its parent ends. Later it sees the end itself.
"""

import signal

from clipscale.common.signals import set_signal_of_parents_end
from clipscale.config.libraries import hidden_packages

set_signal_of_parents_end(signal.SIGKILL)
try:
    with hidden_packages("transformers", "wandb"):
        import clipscale.data.loader.workers
        import clipscale.data.tokenizer  # noqa: F401
finally:
    set_signal_of_parents_end(0)
