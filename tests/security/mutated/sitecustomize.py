"""Takes out a defence in every Python process that a mutated test starts.

Python runs this module at the start of each process that has this folder on PYTHONPATH, which the
mutation runner puts there, and nobody else. The product has no hook for it.
"""

import os

if name := os.environ.get("KVCAST_MUTATION"):
    import defence_mutations as mutations

    taken_out = mutations.MUTATIONS[name].take_out()  # held: it ends with the process
    taken_out.__enter__()
