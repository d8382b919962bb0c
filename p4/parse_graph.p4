// What every target's parser must distinguish. Each target has a parser of its own.
//
// A kvcast datagram is IPv4 without options, then UDP with destination port KVCAST_UDP_PORT. A
// host's kernel would also deliver two other shapes of frame to that port: with a VLAN tag (hosts
// take priority-tagged frames as untagged), and with UDP behind IPv4 options. Both are `broken`, and
// an enabled switch drops them, or they would pass the guards unseen; host ports are access ports, so
// nothing legitimate is lost. The parser treats a first fragment like any datagram; FrameClass
// refuses it.

#ifndef KVCAST_PARSE_GRAPH_P4_
#define KVCAST_PARSE_GRAPH_P4_

const bit<16> ETHERTYPE_VLAN        = 0x8100; // IEEE 802.1Q
const bit<16> ETHERTYPE_SERVICE_TAG = 0x88A8; // IEEE 802.1ad
const bit<16> ETHERTYPE_OLD_QINQ    = 0x9100;
const bit<4>  IPV4_WORDS            = 5;      // header length without options, RFC 791

#endif
