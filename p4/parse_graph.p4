// What every target's parser tells apart. The graph itself is each target's own.
//
// A kvcast datagram is IPv4 without options, UDP, destination port KVCAST_UDP_PORT. Two disguises
// under which a host's kernel would still deliver a datagram to that port count as broken, and so
// are dropped where the switch guards: a VLAN tag (hosts take priority-tagged frames as untagged;
// host ports are access ports), and UDP behind IPv4 options. A first fragment is parsed like any
// datagram, and told apart by FrameClass.

#ifndef KVCAST_PARSE_GRAPH_P4_
#define KVCAST_PARSE_GRAPH_P4_

const bit<16> ETHERTYPE_VLAN        = 0x8100; // IEEE 802.1Q
const bit<16> ETHERTYPE_SERVICE_TAG = 0x88A8; // IEEE 802.1ad
const bit<16> ETHERTYPE_OLD_QINQ    = 0x9100;
const bit<4>  IPV4_WORDS            = 5;      // header length without options, RFC 791

#endif
