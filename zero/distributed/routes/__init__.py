"""Routes of gathers and sums over ranks: directly from rank to rank, or by node. Each is a record in a file of its own.

`table` has the routes by name. A rank's `Routes` starts operations on those that a plan has chosen.

Letters: W ranks, P elements of a full flat, S = P / W.
"""

from zero.distributed.routes.nodes import (
    across_nodes as across_nodes,
    are_even as are_even,
    are_several as are_several,
    partial_numel as partial_numel,
    within_node as within_node,
)
from zero.distributed.routes.route import (
    GatherRequest as GatherRequest,
    GatherRoute as GatherRoute,
    Received as Received,
    SumRequest as SumRequest,
    SumRoute as SumRoute,
)
from zero.distributed.routes.routes import Routes as Routes
from zero.distributed.routes.table import (
    GATHERS as GATHERS,
    SUMS as SUMS,
    default_gather as default_gather,
    default_sum as default_sum,
    gather_route as gather_route,
    sum_route as sum_route,
)
