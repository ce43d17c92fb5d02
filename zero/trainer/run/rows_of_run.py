"""The data of a run, and the number of its steps, which follows from the rows if `epochs` is set."""

from zero.distributed.world import World
from zero.tracker import Tracker
from zero.trainer.config import Config, flat
from zero.trainer.data import open_data
from zero.trainer.data.windows import Data


def open_rows(config: Config, world: World, tracker: Tracker) -> tuple[Config, Data]:
    """Return the settings with the number of steps, and the data, which is the same on every rank. Collective.

    Raises:
        ConfigError: as `open_data`; or ranks have other settings or data; or the schedule does not fit in the steps.
    """
    rows = config.batch_on(world.size).numbers()[0]
    tracker.waiting("the data")
    data = open_data(config.source(), config.model.seq, config.seed, world, tracker.progress, held=config.val.path)
    world.agree({**flat(config), "digest of the data": data.digest})
    if config.epochs is None:
        return config, data
    count = data.rows_of_epochs(config.epochs)
    steps = -(-count // rows)
    tokens = count * config.model.seq
    tracker.note(f"epochs={config.epochs}: {count:,} rows, {steps:,} steps of {rows}, {tokens:,} tokens with padding")
    tracker.expect(steps)
    config = config.model_copy(update={"steps": steps})
    config.check_steps()
    return config, data
