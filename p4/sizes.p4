// Sizes of the data plane, each with its hardware reason. The numbers that the controller must
// know reach it through P4Info (table sizes, counter sizes) and through the target's profile.

#ifndef KVCAST_SIZES_P4_
#define KVCAST_SIZES_P4_

// Hosts behind one switch. A set of ports is one 32-bit word: the widest that one stateful ALU of
// a Tofino 1 reads, changes and returns in one access. Port 0 is never used.
#define MAX_PORTS 32

// Reads in flight: sets of two entries of three 32-bit words each. On a Tofino 32 Ki entries of a dual
// ALU (64 bit) take 18 RAM blocks of one stage and their bitmaps 10 of the next (docs/tofino.md).
// The hash gives 15 bits to find a set by.
#define PENDING_SETS 32768

// The heat sketch: three rows of 32-bit words. 16 Ki words are 64 KiB, four RAM blocks and a
// spare; the 14 bits of the index are cut from hashes that exist anyway.
#define HEAT_CELLS 16384

// A window of the heat sketch is 2^14 ticks of 64 us, about a second: a shift, since no pipeline
// divides.
#define HEAT_WINDOW_SHIFT 14

// Ethernet and IPv4 forwarding beside kvcast: what a top-of-rack switch holds.
#define L2_HOSTS 16384
#define IPV4_ROUTES 4096

// Source addresses by port: 32 ports and 128 addresses behind each.
#define GUARDED_SOURCES 4096

// Namespaces by port: 32 ports and 256 namespaces on each.
#define GUARDED_NAMESPACES 8192

// 1024 buckets with up to eight homes, each behind one port.
#define BUCKET_HOMES 8192

// The pool's own queue pair, and each reader's landing zone.
#define RDMA_TARGETS 64

// A home and a reader each: 32 times 32.
#define LANDING_ZONES 1024

// Reader groups alive at once; each has multicast state of its own, which is the scarcer.
#define READER_GROUPS 4096

// Port sets that recur and have a tight multicast group. Ids 2048 to 32767 are theirs; P4Runtime's
// PI reserves the ids above.
#define PORT_SETS 4096

// Segments in switch memory. A slot is 64 cells of 1 KiB, so that slot and chunk concatenate to
// the cell's index. 256 slots are 16 MiB on v1model, the order of what a Tofino 2 has in a pipe
// (about 11 MiB of registers).
#if defined(KVCAST_TOFINO2)
#define SLOTS 128
#elif defined(KVCAST_TOFINO1)
#define SLOTS 64
#else
#define SLOTS 256
#endif
#define CELLS (SLOTS * 64)

// A slot holds one segment at a time; two more entries' worth covers an entry that is replaced
// before its predecessor goes.
#define RESIDENT_SEGMENTS 512

#endif
