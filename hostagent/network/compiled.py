"""`python -m kvcast.hostagent.network.compiled`: compile all that an agent runs compiled, into the
cache, so that agents that start later find it there. Owns: the list of what is compiled.
"""

from kvcast.hostagent.network import calling_card, courier, lander, landing_zone, mover
from kvcast.protocol import chains, lane, placement
from kvcast.protocol import courier as couriers
from kvcast.protocol.requester import landing


def main() -> None:
    """See the module's description."""
    agents = (calling_card, courier, lander, landing_zone, mover)
    for module in (chains, couriers, lane, placement, landing, *agents):
        make = getattr(module, "compiled", None) or module._compiled
        make()


if __name__ == "__main__":
    main()
