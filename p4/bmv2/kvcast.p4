// kvcast on BMv2's simple_switch_grpc: the v1model program, told that this target cannot make a
// packet more than 512 bytes longer, and aborts where a program tries.

#define PACKETS_CANNOT_GROW

#include "../v1model/kvcast.p4"
