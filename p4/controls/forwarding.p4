// Top-of-rack forwarding: where a frame goes by its addresses alone. Ethernet destinations known to
// the controller, flooding for those that it names (broadcast, multicast), and IPv4 routes for what
// is addressed to the router. Unknown unicast is dropped, not flooded: every host is known. Runs on
// every frame that is not answered here; Route says what that means.

control Forwarding(inout headers_t hdr, inout local_metadata_t local_metadata) {
    @name(".to_port")
    action to_port(bit<9> port, bit<32> port_bit) {
        local_metadata.out_port = port;
        local_metadata.out_bit = port_bit;
        local_metadata.delivery = DELIVER_UNICAST;
    }

    @name(".to_router")
    action to_router() {
        local_metadata.to_router = 1;
    }

    @name(".flood")
    action flood() {
        local_metadata.group = ALL_PORTS_GROUP;
        local_metadata.delivery = DELIVER_FLOOD;
    }

    @name(".no_route")
    action no_route() {
        local_metadata.delivery = DELIVER_NOWHERE;
    }

    @name(".to_nexthop")
    action to_nexthop(bit<9> port, bit<32> port_bit, bit<48> dst_mac, bit<48> src_mac) {
        local_metadata.out_port = port;
        local_metadata.out_bit = port_bit;
        local_metadata.delivery = DELIVER_UNICAST;
        local_metadata.rewritten = 1;
        hdr.ethernet.dst = dst_mac;
        hdr.ethernet.src = src_mac;
        hdr.ipv4.ttl = hdr.ipv4.ttl - 1;
    }

    @name(".l2_forward")
    table l2_forward {
        key = { hdr.ethernet.dst : exact; }
        actions = { to_port; to_router; flood; no_route; }
        const default_action = no_route();
        size = L2_HOSTS;
    }

    @name(".ipv4_route")
    table ipv4_route {
        key = { hdr.ipv4.dst : lpm; }
        actions = { to_nexthop; no_route; }
        const default_action = no_route();
        size = IPV4_ROUTES;
    }

    apply {
        l2_forward.apply();
        if (local_metadata.to_router == 1) {
            // RFC 1812: a packet whose TTL ends here, or whose header is damaged, goes no further.
            if (hdr.ipv4.isValid() && hdr.ipv4.ttl > 1 && local_metadata.damaged == 0) {
                ipv4_route.apply();
            } else {
                no_route();
            }
        }
    }
}
