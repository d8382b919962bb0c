// Decides which multicast group carries copies to a set of ports: one that the controller installed
// for exactly this set, or the group of all ports, which is always right, since egress filters.

control PortSet(in meta_t meta, inout bit<16> group) {
    action set_group(bit<16> mcast_group) { group = mcast_group; }
    table port_set {
        key = { meta.copy_bits : exact @name("port_bits"); }
        actions = { set_group; }
        default_action = set_group(ALL_PORTS_GROUP);
        size = PORT_SET_ENTRIES;
    }
    apply { port_set.apply(); }
}
