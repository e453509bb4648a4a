"""python -m legorl.sandbox setup|probe|reap: what the Makefile calls."""

import asyncio

from legorl.options import say
from legorl.sandbox.setup import setup

asyncio.run(setup(lambda text: say(text)))
