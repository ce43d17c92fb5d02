"""For people who come with a model, a loop and often a `ds_config.json` of their own.

    engine, optimizer, loader, scheduler = zero.initialize(model=model, config="ds_config.json")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

The names and the order are DeepSpeed's, so a script changes by two words. Behind them is the same plan, state and step
as everywhere here; nothing in this family shards, gathers or updates anything.

`begin` makes everything, `engine` is the loop's face, `answers` what it is asked, `saved` how it is written and read,
`original` what becomes of the user's model, `optimizers` what a torch optimizer means here, `schedulers` who writes the
learning rate, `classes` both by DeepSpeed's names, `loader` the loader that is made from a dataset, `checkpoints` where
they are and what they say of a loop, `plain` what they can say, `whole` a model in one piece, `watched` what a run
leaves behind, `aside` what a script asks for beside its engine.
"""

from zero.interop.begin import add_config_arguments, init_distributed, initialize
from zero.interop.engine import Engine

__all__ = ["Engine", "add_config_arguments", "init_distributed", "initialize"]
