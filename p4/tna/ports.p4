// Where a frame goes round: the recirculation port of the pipe that it is in, whose registers hold
// the pool. The lower seven bits of a device port are its number in the pipe.

#ifndef KVCAST_PORTS_TNA_P4_
#define KVCAST_PORTS_TNA_P4_

#ifdef KVCAST_TOFINO2
const bit<7> RECIRCULATION_PORT = 6;
#else
const bit<7> RECIRCULATION_PORT = 68;
#endif

#endif
