// Table and register sizes, each with its reason. One file, so that a target's budget is read in
// one place; a target that holds less has a profile that says so.

#ifndef KVCAST_SIZES_P4_
#define KVCAST_SIZES_P4_

// Hosts behind the switch: a top-of-rack switch with its rack and the fabric's host routes.
#define FORWARD_ENTRIES 16384
// One source address a port is usual; a few more for containers.
#define PORT_GUARD_ENTRIES 4096
// 32 ports by 128 namespaces.
#define NAMESPACE_GUARD_ENTRIES 4096
// 1024 buckets by up to four owners.
#define BUCKET_OWNER_ENTRIES 4096
#define READER_GROUP_ENTRIES 4096
// Port sets that recur; the controller keeps at most this many multicast groups for them.
#define PORT_SET_ENTRIES 1024

// 2^16 entries of 12 bytes: 768 KiB, one and a half stages of Tofino 1. At 64 KiB a segment they
// stand for 4 GiB in flight.
#define PENDING_ENTRIES 65536

// Segments resident at once. On v1model a cell is host memory; 256 slots of 64 KiB are 16 MiB,
// more than either Tofino holds, so that a laptop can show what a switch would do.
#define SLOTS 256
#define CELLS 16384

// Three rows of a count-min sketch (Cormode and Muthukrishnan, 2005): with 2^14 counters a row and
// 10^4 reads a window an overestimate by more than one read has a probability below 1 in 4.
#define HEAT_COUNTERS 16384

#endif
