"""How the demo checkpoint is made: a corpus of our own, a tokenizer, a training run.

Every word the model sees is written in ``texts/`` or put together by the modules here, so corpus
and weights are under the licence of this repository, Apache-2.0::

    python -m shoal.server.demo.training.prepare --out DATA
    python -m shoal.server.demo.training.train --data DATA --out server/demo/checkpoint

Only ``train`` needs PyTorch, and a GPU to be done in minutes. Nothing here runs when Shoal serves.
"""
