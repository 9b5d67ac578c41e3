import { App } from "./App";

/** Airflow renders `globalThis[<name of the react app>]`; both apps in plugins/delay.py have this name. */
Reflect.set(globalThis, "Delayed messages", App);
