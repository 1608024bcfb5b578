#ifndef S
#define S
#define MHA_SM80_SHARED_BYTES(d_qk, d_v, rows, keys, stages)                                                 \
    (2 * ((rows) * ((d_qk) > (d_v) ? (d_qk) : (d_v)) + (stages) * (keys) * ((d_qk) + (d_v))))
#endif
