// Decides where ordinary traffic, and every kvcast frame that goes to its addressee, leaves: by
// destination MAC, or by destination IP for what is addressed to the switch's router MAC.
// Runs first, since a packet's egress bit is part of its port set.

control Forwarding(inout headers_t hdr, inout meta_t meta) {
    action to_port(bit<9> port, bit<32> port_bit) {
        meta.route = ROUTE_PORT;
        meta.egress_port = port;
        meta.egress_bit = port_bit;
    }
    action to_router() { meta.route = ROUTE_ROUTER; }
    action flood() { meta.route = ROUTE_FLOOD; }
    action no_route() { meta.route = ROUTE_NONE; }
    action to_nexthop(bit<9> port, bit<32> port_bit, bit<48> dst_mac, bit<48> src_mac) {
        meta.route = ROUTE_PORT;
        meta.egress_port = port;
        meta.egress_bit = port_bit;
        meta.rewritten = 1;
        hdr.ethernet.dst = dst_mac;
        hdr.ethernet.src = src_mac;
        hdr.ipv4.ttl = hdr.ipv4.ttl - 1;
    }
    table l2_forward {
        key = { hdr.ethernet.dst : exact; }
        actions = { to_port; to_router; flood; no_route; }
        const default_action = no_route();
        size = FORWARD_ENTRIES;
    }
    table ipv4_route {
        key = { hdr.ipv4.dst : lpm; }
        actions = { to_nexthop; no_route; }
        const default_action = no_route();
        size = FORWARD_ENTRIES;
    }
    apply {
        l2_forward.apply();
        if (meta.route == ROUTE_ROUTER) {
            meta.route = ROUTE_NONE;
            if (hdr.ipv4.isValid() && hdr.ipv4.ttl > 1) { ipv4_route.apply(); }
        }
    }
}
