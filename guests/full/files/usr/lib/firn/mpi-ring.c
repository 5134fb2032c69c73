/*
 * A parallel job with one right answer: `rounds` times, every rank mixes a block of numbers, passes it to the next
 * rank, and all add up a checksum, which rank 0 prints.
 *
 *     mpirun -n 2 firn-mpi-ring ROUNDS
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NUMBERS = 16384 };

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

int main(int argc, char **argv)
{
    static uint64_t mine[NUMBERS], theirs[NUMBERS];
    uint64_t sum = 0, total = 0;
    int rank, ranks, rounds = argc > 1 ? atoi(argv[1]) : 100;

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int i = 0; i < NUMBERS; i++)
        mine[i] = mix((uint64_t)rank << 32 | i);
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < NUMBERS; i++)
            mine[i] = mix(mine[i] + total);
        MPI_Sendrecv(mine, NUMBERS, MPI_UINT64_T, (rank + 1) % ranks, 0, theirs, NUMBERS, MPI_UINT64_T,
                     (rank + ranks - 1) % ranks, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        memcpy(mine, theirs, sizeof mine);
        sum = 0;
        for (int i = 0; i < NUMBERS; i++)
            sum += mine[i];
        MPI_Allreduce(&sum, &total, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    }
    if (rank == 0)
        printf("%016llx\n", (unsigned long long)total);
    MPI_Finalize();
    return 0;
}
