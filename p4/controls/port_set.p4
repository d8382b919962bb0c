// Chooses the multicast group for a set of ports: a tight one where the controller has installed
// it for a set that recurs, else all ports, which is always right because egress filters. Runs on
// frames to be shared.

control PortSet(inout local_metadata_t local_metadata, in bit<32> port_bits) {
    @name(".set_group")
    action set_group(bit<16> group) {
        local_metadata.group = group;
    }

    @name(".port_set")
    table port_set {
        key = { port_bits : exact @name("port_bits"); }
        actions = { set_group; }
        const default_action = set_group(ALL_PORTS_GROUP);
        size = PORT_SETS;
    }

    apply {
        port_set.apply();
    }
}
