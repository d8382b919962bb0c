// What v1model calls the things that the shared controls need; a TNA top file brings its own
// arch.p4 instead. Include before any control.

#ifndef KVCAST_ARCH_P4_
#define KVCAST_ARCH_P4_

#include <core.p4>
#include <v1model.p4>

#define DIRECT_COUNTER(name) direct_counter(CounterType.packets_and_bytes) name
#define PACKET_COUNTER(size, name) counter(size, CounterType.packets) name

typedef bit<32> slot_index_t;     // what indexes an array of slots
#define TARGET_METADATA

// Which READs can become DATA, by their flags: all; or only those that bring padding, so that a
// host that leaves it out gets its answer from the home, and does not stop the switch.
#ifdef PACKETS_CANNOT_GROW
#define SERVABLE_FLAGS FLAG_PADDED &&& FLAG_PADDED
#else
#define SERVABLE_FLAGS _
#endif

#endif
