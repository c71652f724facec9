/* Owns dlsym() of the process, by which programs find the driver's functions.
 * Must not know what is done with the functions that are replaced.
 *
 * The C library's dlsym() looks at the address that it returns to: RTLD_NEXT depends on who asks.
 * So the function below is written in assembly. It lets rbi_dlsym_choose() say who answers, and
 * jumps there with the caller's registers and stack. It takes no lock and no memory. */
#include <dlfcn.h>
#include <string.h>

#include "preload/preload.h"

#if defined(__x86_64__)
__asm__(".text\n"
        ".p2align 4\n"
        ".globl dlsym\n"
        ".type dlsym, @function\n"
        "dlsym:\n"
        "    .cfi_startproc\n"
        "    endbr64\n"
        "    pushq %rdi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    pushq %rsi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    subq $8, %rsp\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    movq 24(%rsp), %rdx\n" /* where the caller goes on */
        "    call rbi_dlsym_choose\n"
        "    addq $8, %rsp\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    popq %rsi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    popq %rdi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    jmp *%rax\n"
        "    .cfi_endproc\n"
        ".size dlsym, .-dlsym\n");
#elif defined(__aarch64__)
__asm__(".text\n"
        ".p2align 4\n"
        ".globl dlsym\n"
        ".type dlsym, %function\n"
        "dlsym:\n"
        "    .cfi_startproc\n"
        "    hint #34\n" /* bti c */
        "    stp x29, x30, [sp, #-32]!\n"
        "    .cfi_def_cfa_offset 32\n"
        "    .cfi_offset 29, -32\n"
        "    .cfi_offset 30, -24\n"
        "    mov x29, sp\n"
        "    stp x0, x1, [sp, #16]\n"
        "    mov x2, x30\n" /* where the caller goes on */
        "    bl rbi_dlsym_choose\n"
        "    mov x16, x0\n"
        "    ldp x0, x1, [sp, #16]\n"
        "    ldp x29, x30, [sp], #32\n"
        "    .cfi_restore 30\n"
        "    .cfi_restore 29\n"
        "    .cfi_def_cfa_offset 0\n"
        "    br x16\n"
        "    .cfi_endproc\n"
        ".size dlsym, .-dlsym\n");
#else
#error "librebatch_wrap.so is for x86-64 and aarch64"
#endif

/* ---- who answers ---- */

static void *answer_hook(void *handle, const char *symbol)
{
    return rbi_hook_replace_symbol(symbol, rbi_dlsym_real()(handle, symbol));
}

/* Called by dlsym(). With RTLD_NEXT and RTLD_DEFAULT the answer depends on the caller, and on what
 * stands before and after this library. The driver's own questions are about itself. */
rbi_dlsym *rbi_dlsym_choose(void *handle, const char *symbol, const void *caller)
    __attribute__((used));

rbi_dlsym *rbi_dlsym_choose(void *handle, const char *symbol, const void *caller)
{
    if (handle == RTLD_NEXT || handle == RTLD_DEFAULT || !symbol)
        return rbi_dlsym_real();
    if (symbol[0] == 'r' && strcmp(symbol, RBI_CUDA_REAL_DLSYM) == 0)
        return rbi_dlsym_answer_rebatch; /* a device of this library asks for this name first */
    if (!rbi_hook_is_symbol(symbol) || rbi_driver_has(caller))
        return rbi_dlsym_real();
    return answer_hook;
}
