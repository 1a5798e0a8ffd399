"""The contract's own version, apart from the versions of the two services that speak it.

`protos/released/<version>.binpb` is the contract as released; `make check` compares the protos with the newest of them.
"""

CONTRACT_VERSION = "0.1"
