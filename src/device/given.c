/* Owns the records of what a device has given out that is given back with its size.
 * Must not know what it is. */
#include "device/device.h"

void rbi_given_add(rebatch_device *device, struct rbi_given **list, struct rbi_given *given)
{
    (void)pthread_mutex_lock(&device->given_lock);
    given->next = *list;
    *list = given;
    (void)pthread_mutex_unlock(&device->given_lock);
}

struct rbi_given *rbi_given_take(rebatch_device *device, struct rbi_given **list,
                                 const void *address, size_t size, size_t *known)
{
    (void)pthread_mutex_lock(&device->given_lock);
    while (*list && (*list)->address != address)
        list = &(*list)->next;
    struct rbi_given *given = *list;
    *known = given ? given->size : 0;
    if (*known == size && given)
        *list = given->next;
    else
        given = NULL;
    (void)pthread_mutex_unlock(&device->given_lock);
    return given;
}

void rbi_given_forget(struct rbi_given *list)
{
    while (list) {
        struct rbi_given *const given = list;
        list = given->next;
        rbi_heap_free(given);
    }
}
