/* A stand-in for CUDA's driver, with calls.c: it answers what a test writes into its variables.
 * Must not know the tests. */

extern int driver_init_answer, driver_gpus;
int driver_init_answer = 0;
int driver_gpus = 0;

int cuInit(unsigned flags);
int cuInit(unsigned flags)
{
    return flags == 0 ? driver_init_answer : 1;
}

int cuDeviceGetCount(int *count);
int cuDeviceGetCount(int *count)
{
    *count = driver_gpus;
    return 0;
}
