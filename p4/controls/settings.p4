// Settings that the controller may change while traffic runs, as the default action of a table
// without a key. Runs first. Until a controller speaks, the switch is a plain one.

control Settings(inout local_metadata_t local_metadata) {
    // enabled: 0 = kvcast frames are ordinary traffic. lease_ticks: how long (64 us each) a pending
    // entry holds back other reads; two to three times the 99th percentile of a round trip.
    // heat_threshold: reads of a segment in a window that are worth a digest; 0 = never.
    @name(".set_settings")
    action set_settings(bit<8> enabled, bit<32> lease_ticks, bit<32> heat_threshold) {
        local_metadata.enabled = enabled;
        local_metadata.lease_ticks = lease_ticks;
        local_metadata.heat_threshold = heat_threshold;
    }

    @name(".settings")
    table settings {
        actions = { set_settings; }
        default_action = set_settings(0, 312, 0);  // off; 20 ms
    }

    apply {
        settings.apply();
    }
}
