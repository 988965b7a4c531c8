"""A worker of the tiny model, as a process that can be killed: its address is the argument."""

import sys

from mmjax.engine.encode_worker import EncodeWorker
from mmjax.engine.start import start_encoder
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration
from tests.engine.tiny import engine_config, tiny_params

if __name__ == "__main__":
    parts = start_encoder(
        engine_config(), model_class=Gemma3ForConditionalGeneration, params=tiny_params()[1]
    )
    worker = EncodeWorker(parts, sys.argv[1], None, max_bytes=2**20)
    worker.start()
    print("ready", flush=True)
    worker.run()
