/* A library that has functions of names that others have too.
 * Must not know who calls. */

const char *cudnnCreate(void);
const char *cudnnCreate(void)
{
    return "inner";
}

const char *cuda_outer(void);
const char *cuda_outer(void)
{
    return "inner";
}

int cuMemAlloc_v2(unsigned long long *out, unsigned long bytes);
int cuMemAlloc_v2(unsigned long long *out, unsigned long bytes)
{
    *out = bytes;
    return 0;
}
