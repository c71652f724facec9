/* A stand-in for a driver of CUDA from before it had most of the calls that the library looks for.
 * Must not know the tests. */

int cuInit(unsigned flags);
int cuInit(unsigned flags)
{
    (void)flags;
    return 0;
}
