/* SPDX-License-Identifier: MIT
 *
 * The host planner as a kernel.
 */
#include "cpu.h"

static fmla_status run(const struct kernel_driver *driver, union problem problem,
                       const struct prepared *prepared)
{
    const struct plan_problem *p = problem.plan;
    (void)driver, (void)prepared;
    plan_build(p->plan, p->b, p->lists, p->costs);
    return FMLA_OK;
}

const struct kernel_driver cpu_plan_driver = {.run = run};
