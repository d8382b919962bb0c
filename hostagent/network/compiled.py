"""`python -m kvcast.hostagent.network.compiled`: compile all that an agent runs compiled, into the
cache, so that agents that start later find it there. Owns: the list of what is compiled.
"""

from kvcast.hostagent.network import calling_card, courier, lander, landing_zone, mover
from kvcast.native.subset import Struct, ctypes_of
from kvcast.protocol import chains, lane, lookups, meetings, placement, pushing
from kvcast.protocol import courier as couriers
from kvcast.protocol.requester import landing

_AGENT = (chains, couriers, lane, lookups, meetings, placement, pushing, courier, mover)
_CARDS = (landing, calling_card, landing_zone)
"""What an agent with an RDMA card runs besides."""


def have_ready(*, cards: bool) -> None:
    """Have it in this process, with the structures that it works on, so that no fork of it compiles
    or reads anything, or works out how a structure lies."""
    modules = (*_AGENT, *([lander] if lander.available() else []), *(_CARDS if cards else ()))
    for module in modules:
        make = getattr(module, "compiled", None) or module._compiled
        make()
    for structure in Struct.__subclasses__():
        ctypes_of(structure)


if __name__ == "__main__":
    have_ready(cards=True)
