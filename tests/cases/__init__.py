"""Cases from people who train, by kind: trouble that others met, each as a small test with the right outcome.

The numbers are those of the list of cases; each test names its own. Every file ends with further cases of its kind
that the list does not have.

=================================  =========================================================================
kind                               covered, all through the Checkpointer
=================================  =========================================================================
half-written                       T01, T02 (a sample; the whole sweep: ``tests/fault``), T05 (one process), T07, T08,
                                   T10, T11; kills of a training at random instants: ``test_killed.py``
wrong newest                       T13 (but pruning), T14, T16, T19, T20, T22, T23, T25, T26
async save                         T40, T41, T46 (but pruning), T47, T50 (as far as it concerns restores)
storage faults                     T67, T68 (but copies between tiers), T76, T77; others: tests of the store itself
training state left out            T79, T80, T82, T83 (``test_learning_rate.py``), T85, T86, T88 (one process), T89
data position                      T91, T92, T94, T95, T97, T98
tensor not the same                T112, T113, T115, T116, T118, T119, T121, T122, T124, T125
state tree                         T127, T128, T130, T131, T133
optimizer state                    T134, T136, T137
integrity and trust                T145, T146, T149 (one tier)
restart machinery                  T154 (locks), T155 (at or past the last step), in ``test_integrity.py``
how loops call                     no case of the list: ``test_calls.py``
=================================  =========================================================================

Two cases end otherwise here than where they were seen. T22: the last small write is the ledger's entry, so a quota that
hits it loses that one save, and the run goes on from the one before. T77: altered bytes are found after the commit, and
the checkpoint is quarantined.

What waits, and for what:

* many ranks: T04, T05 and T88 with two processes, T52 to T65, T100, the whole kind *topology change* (T101 to T110)
* tiers and object stores: T17, T43, T44, T49, T50 (the hot tier), T68 (copies), T73, T74, T149 (several tiers)
* retention: T13 and T46 (pruning), T28 to T38
* supervisor: T151, T152
* framework formats: T139 to T143, T145 (foreign checkpoints), T148

Of the kind *storage faults*, T70 (the order of barriers, power cuts) and T71 (short writes) are tests of the store and
of the save: ``tests/fault`` and ``tests/unit``.
"""
